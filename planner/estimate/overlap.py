"""How much communication the same stretch of computation hides.

Collective i takes comm_i seconds and may hide a share_i of it. All that hide behind one stretch of
`compute_s` seconds share it:

    hidden_i  = share_i comm_i min(1, compute / sum_j share_j comm_j)
    exposed_i = comm_i - hidden_i

so a share below one is always seen, nothing hides behind computation that is not there, and more
computation never makes the whole (compute + exposed) shorter, which the search's bounds rely on.
"""

from __future__ import annotations

from collections.abc import Sequence


def exposed_s(comms: Sequence[tuple[float, float]], *, compute_s: float) -> list[float]:
    """Seconds of each collective, given as (seconds, share), that the step waits for."""
    wanted = sum(seconds * share for seconds, share in comms)
    scale = min(1.0, compute_s / wanted) if wanted > 0 else 0.0
    return [seconds * (1 - share * scale) for seconds, share in comms]
