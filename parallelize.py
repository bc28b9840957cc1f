"""`auto_parallelize` as users call it: the runtime, with the planner filled in.

The runtime sees plans alone; this is where the two rooms meet. Both are imported when it is called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from .runtime.parallel import Parallel


def auto_parallelize(model: nn.Module, example_inputs: Any, topology: Any = None, **options: Any) -> Parallel:
    """Plan how to split `model` over `topology` (or take `plan=`) and put it onto this process group.

    See `runtime.api.auto_parallelize` for the options (`plan`, `global_batch`, `loss_fn`, `state_dict`,
    `seed`) and the errors; what else is given goes to `suggest`. To be called on every rank.
    """
    from .planner.suggest import suggest
    from .runtime.api import auto_parallelize as run

    return run(model, example_inputs, topology, planner=suggest, **options)
