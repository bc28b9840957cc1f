"""What the two serving targets share. Of a training plan they take only where weights would lie."""

from __future__ import annotations

from collections.abc import Iterator

from ...planner.plan import Plan
from .facts import is_even


def deviations(plan: Plan, *, target: str) -> Iterator[str]:
    """What of the plan a server does not take."""
    mesh = plan.mesh
    if mesh.pp > 1 and not is_even(plan):
        yield f"{target} cuts layers evenly over pp; the plan does not"
    if plan.serving:
        return
    yield (
        f"this is a training plan: {target} takes only tp={mesh.tp}, pp={mesh.pp} and ep={mesh.ep} from it; "
        "its times and memory are those of training (a server holds no gradients or optimizer state, but a "
        "KV cache), so check the sizes against the server's own memory"
    )
    if mesh.dp * mesh.cp > 1:
        yield f"dp={mesh.dp} and cp={mesh.cp} are not exported: a replica of the server takes tp x pp devices"
    if mesh.pp > 1 and plan.virtual_stages > 1:
        yield f"{target} has no virtual stages: each rank serves one run of layers"
