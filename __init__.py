"""tpplan: plan how to split any PyTorch model over a cluster, and say why.

The public names are listed once, in `_HOMES`; each is imported when it is first used, so that
`import tpplan` costs nothing and loads no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .parallelize import auto_parallelize
    from .planner.errors import TpplanError, UserError
    from .planner.mesh import Mesh
    from .planner.plan import Infeasible, Plan
    from .planner.plan_file import load as load_plan
    from .planner.plan_file import save as save_plan
    from .planner.suggest import suggest
    from .planner.topology import Topology
    from .runtime.resume import Checkpoints
    from .topologies.load import load as load_topology

__version__ = "0.1.0"

_HOMES = {
    "Checkpoints": ".runtime.resume:Checkpoints",
    "Infeasible": ".planner.plan:Infeasible",
    "Mesh": ".planner.mesh:Mesh",
    "Plan": ".planner.plan:Plan",
    "Topology": ".planner.topology:Topology",
    "TpplanError": ".planner.errors:TpplanError",
    "UserError": ".planner.errors:UserError",
    "auto_parallelize": ".parallelize:auto_parallelize",
    "load_plan": ".planner.plan_file:load",
    "load_topology": ".topologies.load:load",
    "save_plan": ".planner.plan_file:save",
    "suggest": ".planner.suggest:suggest",
}

__all__ = ["__version__", *_HOMES]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> object:
    """Import a public name on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = _HOMES[name].partition(":")
    value = globals()[name] = getattr(import_module(module, __name__), attribute)
    return value


def __dir__() -> list[str]:
    """The public names, imported or not."""
    return sorted(__all__)
