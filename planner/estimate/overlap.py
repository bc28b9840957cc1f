"""How much of a communication computation hides.

A collective of `comm_s` that may hide a `share` of itself behind `compute_s` of independent
computation leaves

    exposed = comm - min(share * comm, compute)

so a share below one is always seen, and nothing hides behind computation that is not there.
"""

from __future__ import annotations


def exposed_s(comm_s: float, *, share: float, compute_s: float) -> float:
    """Seconds of `comm_s` that the step waits for."""
    return comm_s - min(share * comm_s, compute_s)
