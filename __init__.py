"""tpplan: plan how to split any PyTorch model over a cluster, and say why.

The public names are listed once, in `_HOMES`; each is imported when it is first used, so that
`import tpplan` costs nothing and loads no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .planner.errors import TpplanError, UserError
    from .planner.mesh import Mesh
    from .planner.plan import Infeasible, Plan
    from .planner.plan_file import load_plan, save_plan
    from .planner.suggest import suggest
    from .planner.topology import Topology
    from .topologies.load import load_topology

__version__ = "0.1.0"

_HOMES = {
    "Infeasible": ".planner.plan",
    "Mesh": ".planner.mesh",
    "Plan": ".planner.plan",
    "Topology": ".planner.topology",
    "TpplanError": ".planner.errors",
    "UserError": ".planner.errors",
    "load_plan": ".planner.plan_file",
    "load_topology": ".topologies.load",
    "save_plan": ".planner.plan_file",
    "suggest": ".planner.suggest",
}

__all__ = ["__version__", *_HOMES]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> object:
    """Import a public name on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name], __name__), name)
    return value


def __dir__() -> list[str]:
    """The public names, imported or not."""
    return sorted(__all__)
