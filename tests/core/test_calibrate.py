"""Scales from measured runs: the fit, the file of runs, the cluster file, what predictions do with them."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tpplan.planner.cost import Work
from tpplan.planner.errors import TopologyError
from tpplan.planner.estimate.calibration import calibration
from tpplan.planner.estimate.collectives import model
from tpplan.planner.estimate.compute import kernel_time
from tpplan.planner.estimate.frameworks import FRAMEWORKS
from tpplan.planner.estimate.measured import calibrated
from tpplan.planner.fit_scales import Case, Scales, fit_scales
from tpplan.planner.layout import Collective
from tpplan.planner.run_file import load_runs
from tpplan.planner.topology import Efficiency, MeasuredScale, Topology
from tpplan.topologies import load, load_file, topology_hash
from tpplan.topologies.scales_text import with_scales

from .sample_plan import llama3_8b

GEMM = Work(family="gemm", flops=2.0 * 4096**3, bytes=6.0 * 4096**2, dtype="bf16", m=4096, n=4096, k=4096)


def scale(name: str, value: float, *, framework: str = "torch", uncertainty: float = 0.05) -> MeasuredScale:
    return MeasuredScale(
        name=name, framework=framework, value=value, uncertainty=uncertainty, runs=3, source="3 runs"
    )


# --------------------------------------------------------------------------- the fit


def case(
    kernels_s: float, collectives_s: float, *, true: Scales, noise: float = 1.0, fixed_s: float = 0.1
) -> Case:
    """A run that takes some time in kernels, some in exposed collectives, and some in neither."""

    def predict(scales: Scales) -> float:
        return (
            fixed_s + kernels_s * scales.get("kernels", 1.0) + collectives_s * scales.get("collectives", 1.0)
        )

    return Case(
        name="run", step_s=predict(true) * noise, memory_bytes=None, predict=predict, allocated_bytes=8e9
    )


@given(kernels=st.floats(0.5, 3.0), collectives=st.floats(0.5, 3.0))
def test_both_scales_come_back_from_runs_that_differ(kernels: float, collectives: float):
    true = {"kernels": kernels, "collectives": collectives}
    cases = [case(*seconds, true=true) for seconds in ((1.0, 0.1), (1.0, 2.0), (3.0, 0.5), (0.4, 3.0))]
    found = {one.name: one.value for one in fit_scales(cases, framework="torch", source="here").scales}
    assert found["kernels"] == pytest.approx(kernels, rel=0.02)
    assert found["collectives"] == pytest.approx(collectives, rel=0.02)


def test_runs_without_exposed_collectives_tell_only_kernels():
    cases = [case(1.0, 0.0, true={"kernels": 1.4}), case(2.0, 0.0, true={"kernels": 1.4})]
    found = fit_scales(cases, framework="torch", source="here")
    assert [(one.name, one.value) for one in found.scales] == [("kernels", pytest.approx(1.4, rel=0.01))]
    assert all(run.after_s == pytest.approx(run.measured_s, rel=0.01) for run in found.runs)
    assert all(run.before_s < run.measured_s for run in found.runs)


def test_a_single_run_cannot_tell_two_scales_apart():
    found = fit_scales([case(1.0, 1.0, true={"kernels": 1.5})], framework="torch", source="here")
    assert [one.name for one in found.scales] == ["kernels"]


def test_uncertainty_shrinks_with_runs_that_agree_and_grows_with_runs_that_do_not():
    def width(*noises: float) -> float:
        cases = [case(1.0, 0.0, true={"kernels": 1.3}, noise=noise) for noise in noises]
        return fit_scales(cases, framework="torch", source="here").scales[0].uncertainty

    assert width(1.0, 1.0, 1.0, 1.0, 1.0, 1.0) < width(1.0) < width(0.7, 1.4)
    assert width(1.0) == pytest.approx(math.expm1(1.2816 * math.sqrt(2 * 0.08**2 / 3)), rel=0.02)


def test_memory_is_a_ratio_of_allocated_bytes():
    cases = [replace(case(1.0, 0.0, true={}), memory_bytes=nbytes) for nbytes in (8.8e9, None, 8.0e9)]
    found = {one.name: one for one in fit_scales(cases, framework="torch", source="here").scales}
    assert found["memory"].value == pytest.approx(math.sqrt(1.1), rel=1e-3)
    assert found["memory"].runs == 2


# --------------------------------------------------------------------------- what predictions do with them


def h100(*scales: MeasuredScale) -> Topology:
    return replace(load("dgx-h100"), scales=scales)


def test_measured_kernels_take_the_place_of_published_ones():
    torch = FRAMEWORKS["torch"]
    assert calibration(h100().device, torch) is not None
    plain = kernel_time(GEMM, replace(h100().device)).seconds
    found = calibrated(h100(scale("kernels", 1.5)), torch)
    assert found.published is None
    assert kernel_time(GEMM, found.topology.device).seconds == pytest.approx(1.5 * plain)
    other = calibrated(h100(scale("kernels", 1.5, framework="megatron")), torch)
    assert other.published is not None and other.measured == ()


def test_measured_collectives_slow_every_link():
    topology = h100().with_nodes(4)
    slow = calibrated(replace(topology, scales=(scale("collectives", 2.0),)), FRAMEWORKS["torch"]).topology
    for size in (8, 32):
        span = topology.span(size=size, stride=1)
        times = [model(t).time(Collective.ALL_REDUCE, 2**26, span).seconds for t in (topology, slow)]
        assert times[1] == pytest.approx(2.0 * times[0], rel=0.01)


def test_measured_memory_scales_the_reserve_and_never_below_none():
    torch = FRAMEWORKS["torch"]
    typical, upper = torch.allocator_reserve
    more = calibrated(h100(scale("memory", 1.2)), torch).framework.allocator_reserve
    assert more == (pytest.approx(typical * 1.2), pytest.approx(upper * 1.2))
    assert calibrated(h100(scale("memory", 0.5)), torch).framework.allocator_reserve == (1.0, 1.0)


def test_predictions_say_what_was_measured_and_how_sure_it_is():
    plan = calibrated(h100(scale("kernels", 1.5, uncertainty=0.25)), FRAMEWORKS["torch"]).annotate(
        llama3_8b()
    )
    step = plan.predicted.step_time_s
    assert plan.predicted.step_time_interval_s == (pytest.approx(step / 1.25), pytest.approx(step * 1.25))
    assert any(
        "kernels take 1.500 (+-25%) times what is predicted under torch" in told for told in plan.assumptions
    )
    plain = calibrated(h100(), FRAMEWORKS["torch"]).annotate(llama3_8b())
    assert any("published runs" in told for told in plain.assumptions)


# --------------------------------------------------------------------------- the cluster file

CLUSTER = """name: lab  # ours
device: cpu
levels:
  - {name: cluster, size: 2, kind: tcp, gb_per_s: 1, latency_us: 9, efficiency: 0.5}
"""


def test_scales_are_written_into_the_file_and_nothing_else_changes(tmp_path: Path):
    path = tmp_path / "lab.yaml"
    once = with_scales(CLUSTER, [scale("kernels", 1.5)])
    twice = with_scales(once + "description: more\n", [scale("kernels", 1.25), scale("memory", 1.1)])
    path.write_text(twice)
    assert once.startswith(CLUSTER) and "description: more" in twice
    assert load_file(path).scales == (scale("kernels", 1.25), scale("memory", 1.1))
    assert with_scales(twice, []) == CLUSTER + "description: more\n"


def test_scales_count_for_plans_and_their_absence_does_not(tmp_path: Path):
    assert topology_hash(h100(scale("kernels", 1.5))) != topology_hash(h100())
    assert topology_hash(h100(scale("kernels", 1.5))) != topology_hash(h100(scale("kernels", 1.6)))


def test_a_scale_given_twice_is_an_error(tmp_path: Path):
    path = tmp_path / "lab.yaml"
    path.write_text(with_scales(CLUSTER, [scale("kernels", 1.5), scale("kernels", 1.6)]))
    with pytest.raises(TopologyError, match=r"scales\[1\].name: kernels of torch a second time"):
        load_file(path)


# --------------------------------------------------------------------------- the file of runs


def test_runs_as_bench_writes_them(tmp_path: Path):
    (tmp_path / "plan.yaml").write_text("")
    (tmp_path / "small.py").write_text("")
    (tmp_path / "runs.yaml").write_text(
        "runs:\n- {model: 'small.py:gpt', plan: plan.yaml, step_s: 0.5, memory_bytes: 12, device: cpu,\n"
        "   ranks: 4, date: '2026-11-30'}\n"
        "- {model: other.py, set: {tp: 2, recompute: full}, global_batch: 8, step_s: 1.5}\n"
    )
    first, second = load_runs(tmp_path / "runs.yaml")
    assert (first.model, first.plan) == (f"{tmp_path}/small.py:gpt", f"{tmp_path}/plan.yaml")
    assert (first.name, second.name) == ("small.py:gpt plan.yaml", "other.py tp=2,recompute=full")
    assert second.model == "other.py"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("runs: []", "runs.yaml:1: runs"),
        (
            "runs:\n- {model: a.py, step_s: 1}",
            r"runs.yaml:2: runs\[0\]: give `plan` \(a plan file\) or `set`",
        ),
        ("runs:\n- {model: a.py, set: {tp: 2}, step_s: -1}", r"step_s: found -1, must be greater than 0"),
        (
            "runs:\n- {model: a.py, set: {tp: 2}, steps: 1}",
            r"steps: unknown field 'steps'; did you mean 'step_s'",
        ),
        ("runs:\n- {model: a.py, plan: gone.yaml, step_s: 1}", "there is no file gone.yaml"),
        ("version: 2\nruns:\n- {model: a.py, set: {tp: 2}, step_s: 1}", "version: found 2"),
    ],
)
def test_a_wrong_file_of_runs_is_placed(tmp_path: Path, text: str, message: str):
    path = tmp_path / "runs.yaml"
    path.write_text(text)
    with pytest.raises(TopologyError, match=message):
        load_runs(path)


# --------------------------------------------------------------------------- overlap and host


RECORD = """
profile:
  version: 1
  tpplan: 0.1.0
  torch: 2.13.0
  date: '2026-12-01'
  backend: nccl
  hosts: [a]
  ranks: 2
  seed: 0
  quick: true
  measured_s: 1.0
  overlap: {sigma: 1.8, compute_us: 100.0, collective_us: 100.0, both_us: 180.0}
  host: {forward_us: 10.0, backward_us: 20.0, split_forward_us: 100.0, split_backward_us: 200.0}
"""


def profiled(folder: Path, device: str, record: str = RECORD) -> Topology:
    """Two devices and what was measured on them."""
    level = "{name: cluster, size: 2, kind: tcp, gb_per_s: 1.0, latency_us: 100.0, efficiency: 0.9}"
    path = folder / "lab.yaml"
    path.write_text(f"name: lab\ndevice: {device}\nlevels: [{level}]\n{record}")
    return load_file(path)


def test_no_more_hides_than_was_measured_to_hide(tmp_path: Path):
    topology = profiled(tmp_path, "a100-sxm4-80gb")
    assert topology.overlap == pytest.approx(0.2)
    torch, megatron = (calibrated(topology, FRAMEWORKS[name]).framework for name in ("torch", "megatron"))
    assert (torch.dp_overlap, torch.gather_overlap, torch.tp_overlap) == pytest.approx((0.2, 0.2, 0.0))
    assert (megatron.dp_overlap, megatron.tp_overlap) == pytest.approx((0.2, 0.2))
    unmeasured = calibrated(profiled(tmp_path, "a100-sxm4-80gb", ""), FRAMEWORKS["megatron"]).framework
    assert unmeasured.dp_overlap == FRAMEWORKS["megatron"].dp_overlap


def test_nothing_hides_on_cpus_and_their_host_takes_its_time(tmp_path: Path):
    framework = calibrated(profiled(tmp_path, "cpu"), FRAMEWORKS["tpplan"]).framework
    assert (framework.dp_overlap, framework.gather_overlap, framework.p2p_overlap) == (0.0, 0.0, 0.0)
    assert framework.host is not None
    assert framework.host.forward(3, split=False) == pytest.approx(30e-6)
    assert framework.host.backward(3, split=True) == pytest.approx(600e-6)


def test_an_update_is_priced_by_its_own_curve_where_there_is_one():
    device = load("dgx-a100-80").device
    update = Work(family="optimizer", flops=0.0, bytes=1e9, dtype="fp32")
    same = kernel_time(replace(update, family="memory"), device)
    assert kernel_time(update, device) == same
    slow = Efficiency(curve=((1.0, 0.1),), origin="measured", source="a round number")
    own = replace(device, efficiency={**device.efficiency, "optimizer": slow})
    assert kernel_time(update, own).seconds == pytest.approx(1e9 / (0.1 * device.memory_bytes_per_s))
    assert kernel_time(replace(update, family="memory"), own) == same
