"""How much slower per sample a larger microbatch can be: a bound read off the cost models' curves.

In: a `Topology`. Out: the least e such that, for equal splits, a microbatch of b samples takes at least
(1 - e) b/B of the time of one of B > b samples. It is what lets one intra-op solution at a large
microbatch rule out smaller ones (`search`).

Everything a block does for a microbatch is a sum of parts whose size (FLOPs, bytes, rows) grows with the
microbatch or stays: kernels, collectives, constants. A part costs size / rate(size), or the largest of such
terms, so that per sample it falls with size while its rate never does. Short sides of a matrix product only
help (s(m) grows with m). What overlap hides keeps the property: compute C and communication K, of which at
most W hides, cost max(C + K - W, K), which grows in both and doubles when both double. So e is the largest
fall of any rate below its own earlier values, over the device's efficiency curves and the levels' measured
collectives. Between measured points both are power laws, whose extremes are points; modelled collectives are
latency plus bytes over a constant rate, and the least of several such.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..topology import Topology


def batch_slack(topology: Topology) -> float:
    """The bound e of the module docstring, in [0, 1)."""
    return _slack((*_kernel_rates(topology), *_message_rates(topology)))


def kernel_slack(topology: Topology) -> float:
    """The same of kernels alone, whichever of their dims is cut: all of them raise FLOPs, bytes and sides."""
    return _slack(_kernel_rates(topology))


def _slack(rates: Iterable[list[float]]) -> float:
    return 1 - min((_lowest_share(each) for each in rates), default=1.0)


def _kernel_rates(topology: Topology) -> Iterator[list[float]]:
    """Rates by ascending size of every family of kernels."""
    for efficiency in topology.device.efficiency.values():
        yield [fraction for _, fraction in efficiency.curve]


def _message_rates(topology: Topology) -> Iterator[list[float]]:
    """Rates by ascending size of measured collectives, in bytes per second."""
    for level in topology.levels:
        for curve in level.curves:
            yield [nbytes / seconds for nbytes, seconds in curve.points]


def _lowest_share(rates: Iterable[float]) -> float:
    """The lowest a rate falls to, as a share of the highest before it."""
    highest, share = 0.0, 1.0
    for rate in rates:
        highest = max(highest, rate)
        share = min(share, rate / highest)
    return share
