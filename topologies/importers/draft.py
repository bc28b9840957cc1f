"""A nest of devices and a device's name to a topology file.

In: a `Nest`, the device, what is known of the network. Out: a `Draft`, its YAML text in the format of
`clusters/*.yaml`, and notes on what was assumed. What a paste cannot say (link speeds, the network) is
taken from the device's generation and marked `modelled`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...planner.errors import OptionError, did_you_mean
from ...planner.topology import Device
from .hierarchy import NVLINK, Nest, Tier

NVLINK_GB_PER_S = {"blackwell": 50.0}
"""One NVLink, one direction: NVLink 5 (NVIDIA B200 data sheet: 1.8 TB/s over 18 links, both directions)."""
NVLINK_DEFAULT_GB_PER_S = 25.0
"""NVLink 2, 3 and 4 (NVIDIA V100, A100 and H100 data sheets)."""
BRIDGE_GB_PER_S = 14.0625
"""One of the four links of a workstation bridge (NVIDIA RTX A6000: 112.5 GB/s, both directions)."""
BRIDGED = ("rtx-3090", "rtx-a6000")

PCIE_GB_PER_S = {
    "volta": 15.75,
    "turing": 15.75,
    "ampere": 31.5,
    "ada": 31.5,
    "hopper": 63.0,
    "blackwell": 63.0,
}
"""A x16 slot, one direction: 8, 16 or 32 GT/s x 16 lanes x 128/130 (PCI-SIG), by the card's generation."""
PCIE_DEFAULT_GB_PER_S = 31.5
SOCKETS_GB_PER_S = 62.4
"""Between two sockets, one direction: 3 UPI links x 20.8 GB/s (Intel Xeon Scalable)."""

EFFICIENCY = {"nvlink": (0.68, "as an NVSwitch of A100 (dgx-a100-80)"), "pcie": (0.4, "as 8x-a100-pcie")}
PAIR_EFFICIENCY = (0.69, "nccl-tests#178: 208 of 300 GB/s over one pair")
NO_P2P_EFFICIENCY = (0.46, "public report of 8x RTX 4090, peer-to-peer disabled: 14.45 of 31.5 GB/s")
GEFORCE = re.compile(r"rtx-\d{4}$")
"""Cards whose driver offers no peer-to-peer over PCIe."""
LATENCY_US = {
    "nvlink": (1.05, "as NVLink 3"),
    "pcie": (1.24, "as the L40S over PCIe"),
}
NO_P2P_LATENCY_US = (2.4, "as 8x-rtx4090, through host memory")

NIC_GBIT = {"volta": 100.0, "ampere": 200.0, "hopper": 400.0, "blackwell": 400.0}
"""The NICs sold with a generation: DGX-1, DGX A100, DGX H100 and DGX B200 data sheets."""
NIC_DEFAULT_GBIT = 100.0
NETWORKS = {
    "infiniband": (5.0, 0.85, "an InfiniBand hop"),
    "ethernet": (10.0, 0.8, "twice an InfiniBand hop"),
}
"""Latency (us) and efficiency, as in the bundled clusters."""
GBIT_PER_GB = 8.0

TIER_NAMES = {2: "pair", 4: "quad"}

SWITCHED = ((18, "h100-sxm5-80gb"), (7, "a100-sxm4-80gb"), (0, "v100-sxm2-32gb"))
"""What a switch of at least so many NVLinks per device is likeliest to join."""
CUBE_MESH_LINKS, CUBE_MESH = 6, "v100-sxm2-32gb"
BRIDGES = ((12, "a100-pcie-80gb"), (4, "rtx-3090"), (1, "v100-sxm2-32gb"), (0, "rtx-4090"))
"""The smallest card that is commonly bridged by at least so many NVLinks, or by none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A topology file to be, and what its reader should know."""

    data: dict[str, Any]
    notes: tuple[str, ...]


def draft(
    nesting: Nest, device: Device, *, name: str, nodes: int = 1, nic_gbit: float | None = None
) -> Draft:
    """The topology of `nodes` nodes like this one. `nic_gbit`: what one NIC carries, Gb/s, if known."""
    levels = [_level(tier, i, nesting.tiers, device) for i, tier in enumerate(nesting.tiers)]
    network, notes = _network(nesting, device, nic_gbit)
    described = _describe(nesting, device)
    data: dict[str, Any] = {"name": name, "description": described, "device": device.name}
    if nesting.notes:
        data["notes"] = list(nesting.notes)
    if nesting.nics:
        data["nearest_nics"] = {gpu: list(nics) for gpu, nics in nesting.nearest_nics.items()}
    data["levels"] = [*levels, {"name": "cluster", "size": nodes, **network}]
    return Draft(data=data, notes=(*nesting.notes, *notes))


def choose_device(
    asked: str | None, text: str, nesting: Nest, known: Sequence[str]
) -> tuple[str, str | None]:
    """The device's bundled name, and a note unless it was asked for: the text names it, or a guess.

    Raises `OptionError` for an unknown name.
    """
    if asked:
        if asked not in known and not asked.endswith((".yaml", ".yml")):
            raise OptionError(f"--device {asked}: no such device{did_you_mean(asked, known)}")
        return asked, None
    mentions = _mentions(text, known)
    if mentions:
        form = "sxm" if nesting.tiers[0].switched else "pcie"
        best = min(mentions, key=lambda name: (-mentions[name], form not in name, known.index(name)))
        others = sorted({name for name in mentions if _model(name) != _model(best)})
        also = f" (as {', '.join(others)}: one kind is planned for)" if others else ""
        return best, f"device {best}: the text mentions it{also}; --device says otherwise"
    best = _by_links(nesting)
    return best, f"the paste does not name the device: {best} is a guess from its links; give --device NAME"


def _by_links(nesting: Nest) -> str:
    links = sum(tier.nvlinks for tier in nesting.tiers)
    if nesting.tiers[0].switched:
        return next(device for least, device in SWITCHED if links >= least)
    if links == CUBE_MESH_LINKS:
        return CUBE_MESH
    return next(device for least, device in BRIDGES if links >= least)


def to_yaml(data: Mapping[str, Any]) -> str:
    """The file's text: fields in the order given."""
    import yaml

    return yaml.safe_dump(dict(data), sort_keys=False, allow_unicode=True, width=110)


def _mentions(text: str, known: Sequence[str]) -> dict[str, int]:
    """How often the text names each bundled device's model (`8x RTX 4090`, `H100`).

    Where memory sizes are said too, only the devices that have them count.
    """
    words = re.sub(r"[^a-z0-9]+", " ", text.lower())
    found = {}
    for device in known:
        model = _model(device)
        if model and (count := len(re.findall(rf"\b(?:\d+x ?)?(?:rtx ?)?{model}\b", words))):
            found[device] = count
    return {device: n for device, n in found.items() if _memory_is_said(device, words)} or found


def _model(device: str) -> str:
    """A pattern for the number by which people call a device: `4090`, `a100`; empty if it has none."""
    model = re.match(r"(?:rtx-)?((?:pro-|a)?\d{4})|([a-z]+\d+[a-z]?)", device)
    return (model[1] or model[2]).replace("-", " ?") if model else ""


def _memory_is_said(device: str, words: str) -> bool:
    memory = re.search(r"(\d+)gb", device)
    return memory is not None and re.search(rf"\b{memory[1]} ?gi?b?\b", words) is not None


def _describe(nesting: Nest, device: Device) -> str:
    joined = {NVLINK: "NVLink", "PIX": "PCIe", "PXB": "PCIe", "PHB": "PCIe", "NODE": "PCIe", "SYS": "PCIe"}
    shape = " x ".join(f"{tier.size} ({joined[tier.link]}, {tier.link})" for tier in nesting.tiers)
    nics = f", {len(nesting.nics)} NICs" if nesting.nics else ", no NIC visible"
    return f"{len(nesting.order)} {device.description or device.name}: {shape}{nics}"


def _level(tier: Tier, index: int, tiers: Sequence[Tier], device: Device) -> dict[str, Any]:
    kind = "nvlink" if tier.link == NVLINK else "pcie"
    speed, why = _nvlink_speed(tier, device) if kind == "nvlink" else _pcie_speed(tier, index, tiers, device)
    blocked = kind == "pcie" and GEFORCE.match(device.name) is not None
    efficiency, measured = NO_P2P_EFFICIENCY if blocked else EFFICIENCY[kind]
    if kind == "nvlink" and tier.devices == 2:
        efficiency, measured = PAIR_EFFICIENCY
    latency, as_what = NO_P2P_LATENCY_US if blocked else LATENCY_US[kind]
    last = index == len(tiers) - 1
    return {
        "name": "node" if last else TIER_NAMES.get(tier.devices, f"group of {tier.devices}"),
        "size": tier.size,
        "kind": kind,
        "gb_per_s": round(speed, 4),
        "latency_us": latency,
        "efficiency": efficiency,
        "sources": {
            "gb_per_s": why,
            "latency_us": f"modelled: {as_what}",
            "efficiency": f"modelled: {measured}",
        },
    }


def _nvlink_speed(tier: Tier, device: Device) -> tuple[float, str]:
    one = NVLINK_GB_PER_S.get(device.architecture, NVLINK_DEFAULT_GB_PER_S)
    if device.name in BRIDGED:
        one = BRIDGE_GB_PER_S
    how = "to a switch" if tier.switched else "to peers in this level"
    return one * tier.nvlinks, f"{tier.nvlinks:g} NVLinks a device {how} x {one:g} GB/s per direction"


def _pcie_speed(tier: Tier, index: int, tiers: Sequence[Tier], device: Device) -> tuple[float, str]:
    """A slot's rate, less where devices share a switch's uplink or the link between sockets."""
    slot = PCIE_GB_PER_S.get(device.architecture, PCIE_DEFAULT_GB_PER_S)
    why = f"modelled: a x16 slot, {slot:g} GB/s"
    inside = tiers[index - 1].devices if index else 1
    if index and tiers[index - 1].link in ("PIX", "PXB"):
        return slot / inside, f"{why}, the switch's uplink shared by {inside} devices"
    if tier.link == "SYS":
        sharing = max(inside, 1) if index else tier.devices / 2
        share = SOCKETS_GB_PER_S / sharing
        if share < slot:
            return share, f"modelled: {SOCKETS_GB_PER_S:g} GB/s between sockets shared by {sharing:g} devices"
    return slot, why


def _network(nesting: Nest, device: Device, nic_gbit: float | None) -> tuple[dict[str, Any], tuple[str, ...]]:
    count = max(len(nesting.nics), 1)
    each = nic_gbit or (
        NIC_GBIT.get(device.architecture, NIC_DEFAULT_GBIT) if nesting.nics else NIC_DEFAULT_GBIT
    )
    kind = "infiniband" if nesting.nics else "ethernet"
    latency, efficiency, hop = NETWORKS[kind]
    known = "given" if nic_gbit else "modelled"
    level = {
        "kind": kind,
        "gb_per_s": round(count * each / GBIT_PER_GB / len(nesting.order), 6),
        "latency_us": latency,
        "efficiency": efficiency,
        "sources": {
            "gb_per_s": f"{known}: {count} x {each:g} Gb/s for {len(nesting.order)} devices",
            "latency_us": f"modelled: {hop}",
            "efficiency": "modelled: as the bundled clusters of this kind of network",
        },
    }
    if nic_gbit:
        return level, ()
    if not nesting.nics:
        return level, (
            f"no NIC is visible, so {each:g} Gb/s a node is assumed between nodes: give --nic-gbit, "
            f"or measure it with `tpplan profile`",
        )
    return level, (f"{each:g} Gb/s is assumed for each of {count} NICs: --nic-gbit says otherwise",)
