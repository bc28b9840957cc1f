"""Whether this project's runtime can cut a model into pipeline stages.

In: a graph, a framework. Out: why not, or None. A stage runs the user's own forward and leaves it after
its last layer; with two lists of layers (an encoder and a decoder) later layers read more than the one
activation that is handed on.
"""

from __future__ import annotations

from .errors import OptionError
from .estimate.frameworks import OWN_FRAMEWORK
from .graph import Graph


def uncuttable(graph: Graph, framework: str) -> str | None:
    """Why the framework cannot run this model in a pipeline; None if it can."""
    if framework != OWN_FRAMEWORK:
        return None
    lists = sorted({block.module.removesuffix(".*") for block in graph.blocks.values() if block.repeated})
    if len(lists) > 1:
        return f"a model with several lists of layers ({', '.join(lists)}) is not cut into stages"
    return None


def check_stages(graph: Graph, pp: int, framework: str) -> None:
    """Raise `OptionError` when a chosen number of stages cannot be run."""
    reason = uncuttable(graph, framework) if pp > 1 else None
    if reason is not None:
        raise OptionError(f"pp={pp}: {reason}; available: pp=1")
