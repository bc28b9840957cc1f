"""The local machine as a topology, with every tool and file of it made up."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from tpplan import cli
from tpplan.topologies import list_devices
from tpplan.topologies.importers.detect import bundled_name, detect, nics, run_tool
from tpplan.topologies.importers.draft import to_yaml

from .test_import_topo import PASTES

PRODUCTS = {
    "NVIDIA A100-SXM4-80GB": "a100-sxm4-80gb",
    "NVIDIA A100 80GB PCIe": "a100-pcie-80gb",
    "NVIDIA H100 80GB HBM3": "h100-sxm5-80gb",
    "NVIDIA H100 PCIe": "h100-pcie-80gb",
    "NVIDIA H200": "h200-sxm",
    "NVIDIA GeForce RTX 4090": "rtx-4090",
    "NVIDIA RTX A6000": "rtx-a6000",
    "Tesla V100-SXM2-32GB": "v100-sxm2-32gb",
    "NVIDIA L40S": "l40s",
    "Tesla T4": "t4",
    "GeForce GTX 680": None,
}


@pytest.mark.parametrize(("product", "device"), PRODUCTS.items())
def test_product_names_find_their_device(product: str, device: str | None):
    assert bundled_name(product, list_devices()) == device


class Machine:
    """Answers of the tools of a made-up machine."""

    def __init__(self, names: Sequence[str], matrix: str | None) -> None:
        self.answers = {"topo": matrix, "-L": "".join(self._line(i, name) for i, name in enumerate(names))}

    def _line(self, index: int, name: str) -> str:
        return f"GPU {index}: {name} (UUID: GPU-{index})\n"

    def __call__(self, command: Sequence[str]) -> str | None:
        return self.answers[command[1]]


def rdma_ports(sys: Path, *, rate: str = "400 Gb/sec (4X NDR)", layer: str = "InfiniBand") -> None:
    for i in range(8):
        port = sys / f"class/infiniband/mlx5_{i}/ports/1"
        port.mkdir(parents=True)
        (port / "rate").write_text(rate + "\n")
        (port / "state").write_text("4: ACTIVE\n" if i < 4 else "1: DOWN\n")
        (port / "link_layer").write_text(layer + "\n")


def test_devices_links_and_ports_become_levels(tmp_path: Path):
    rdma_ports(tmp_path)
    machine = Machine(["NVIDIA H100 80GB HBM3"] * 8, PASTES["switch"])
    data = detect(run=machine, sys=tmp_path, nodes=2).data
    node, cluster = data["levels"]
    assert data["device"] == "h100-sxm5-80gb"
    assert (node["size"], node["kind"], node["gb_per_s"]) == (8, "nvlink", 450.0)
    assert (cluster["size"], cluster["kind"]) == (2, "infiniband")
    assert cluster["gb_per_s"] == 4 * 400 / 8 / 8  # four ports are up, for eight devices


def test_without_the_matrix_sockets_are_assumed_and_said(tmp_path: Path):
    found = detect(run=Machine(["NVIDIA L40S"] * 4, None), sys=tmp_path)
    assert found.data["levels"][0]["kind"] == "pcie"
    assert any("topo -m gives nothing" in note for note in found.notes)


def test_mixed_devices_are_said(tmp_path: Path):
    found = detect(run=Machine(["NVIDIA L40S", "Tesla T4"], None), sys=tmp_path)
    assert any("mixed devices (NVIDIA L40S, Tesla T4)" in note for note in found.notes)


def test_ports_that_are_roce_or_ethernet(tmp_path: Path):
    rdma_ports(tmp_path / "a", layer="Ethernet")
    assert {nic.kind for nic in nics(tmp_path / "a")} == {"roce"}
    for name, speed, state in [("eth0", "25000", "up"), ("eth1", "-1", "down"), ("docker0", "10000", "up")]:
        interface = tmp_path / "b/class/net" / name
        interface.mkdir(parents=True)
        (interface / "speed").write_text(speed)
        (interface / "operstate").write_text(state)
        if name != "docker0":
            (interface / "device").mkdir()
    assert [(nic.name, nic.gbit) for nic in nics(tmp_path / "b")] == [("eth0", 25.0)]


def test_a_missing_a_failing_and_a_working_tool():
    assert run_tool(["no-such-tool-anywhere"]) is None
    assert run_tool(["false"]) is None
    assert run_tool(["echo", "here"]) == "here\n"


def test_a_machine_without_devices_is_cpu_ranks(tmp_path: Path):
    found = detect(run=lambda command: None, sys=tmp_path)
    assert found.data["device"] == "cpu" and found.data["levels"][0]["kind"] == "tcp"
    assert "name: this-machine" in to_yaml(found.data)


def test_the_command_writes_a_file(tmp_path: Path, capsys):
    target = tmp_path / "here.yaml"
    assert cli.main(["topology", "detect", "-o", str(target)]) == 0
    assert cli.main(["topology", "show", str(target)]) == 0
    assert "this-machine" in capsys.readouterr().out
