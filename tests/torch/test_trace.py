"""Tracing small models: values, nodes, repeats, and the user's mistakes."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from tpplan.planner.errors import ModelError, TraceError
from tpplan.planner.graph import Ref, Repeat, TracedGraph
from tpplan.planner.graph_cache import TraceOptions, load_cached, load_or_trace
from tpplan.planner.trace import trace_source

EXAMPLES = Path(__file__).parents[2] / "examples"
WIDTH = 8


def trace(model: nn.Module, **options: Any) -> TracedGraph:
    """The graph of a model of one tensor (batch 2, WIDTH)."""
    given = {"example_inputs": (torch.randn(2, WIDTH),), "seq_len": 1, "dtype": "fp32"} | options
    return trace_source(model, **given)


def targets(graph: TracedGraph) -> list[str]:
    """Names of the ops, in order."""
    return [node.target for node in graph.nodes]


class Chain(nn.Module):
    """Layers run one after the other."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Layer(nn.Module):
    """A linear layer; `swish` picks its activation, `index` may change what it does."""

    def __init__(self, *, layer_idx: int = 0, swish: bool = False) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.swish = swish
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return F.silu(y) if self.swish else F.relu(y)


# ------------------------------------------------------------------------------ values and nodes


def test_nodes_name_their_module_their_line_and_their_arguments():
    graph = trace(Chain(Layer(), Layer()))
    first = graph.nodes[0]
    assert (first.target, first.module, first.module_class) == (
        "aten.linear.default",
        "layers.0.linear",
        "Linear",
    )
    assert first.source.startswith("test_trace.py:")
    assert [graph.values[name].fqn for name in first.refs()] == [
        None, "layers.0.linear.weight", "layers.0.linear.bias",
    ]  # fmt: skip
    assert targets(graph) == ["aten.linear.default", "aten.relu.default"] * 2 + ["aten.mean.default"]
    assert graph.values[graph.output].shape == ()
    assert graph.inputs == tuple(name for name, value in graph.values.items() if value.kind == "input")


def test_every_reference_is_to_a_value_made_before():
    graph = trace_source(str(EXAMPLES / "mixtral_8x7b.py"), seq_len=64)
    known = {name for name, value in graph.values.items() if value.kind != "activation"}
    for node in graph.nodes:
        assert set(node.refs()) <= known
        known |= set(node.outputs)
    assert known == set(graph.values)


def test_parameters_take_the_dtype_and_are_counted_once():
    model = Chain(nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False))
    model.layers[1].weight = model.layers[0].weight
    graph = trace(model, dtype="bf16")
    weights = [value for value in graph.values.values() if value.kind == "parameter"]
    assert [(value.fqn, value.dtype, value.trainable) for value in weights] == [
        ("layers.0.weight", "bfloat16", True)
    ]
    assert graph.parameters == graph.trainable_parameters == WIDTH * WIDTH
    linears = [node for node in graph.nodes if node.target == "aten.linear.default"]
    assert linears[0].args[1] == linears[1].args[1] == Ref(weights[0].name)


def test_frozen_parameters_are_not_trainable():
    model = Chain(nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, 1, bias=False))
    model.layers[0].requires_grad_(False)
    graph = trace(model)
    assert (graph.parameters, graph.trainable_parameters) == (WIDTH * WIDTH + WIDTH, WIDTH)
    assert [node.differentiable for node in graph.nodes] == [False, True, True]


def test_several_outputs_belong_to_one_node():
    class Split(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            left, right = x.chunk(2, dim=-1)
            return left * right

    graph = trace(Split())
    chunk, product, _ = graph.nodes
    assert [graph.values[name].shape for name in chunk.outputs] == [(2, WIDTH // 2)] * 2
    assert tuple(product.refs()) == chunk.outputs


def test_an_unused_output_is_kept():
    class Top(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.topk(2).values

    assert len(trace(Top()).nodes[0].outputs) == 2


def test_in_place_ops_make_new_values():
    class InPlace(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * 2
            z = y
            y.add_(1)
            return z * y

    double, add, product, _ = trace(InPlace()).nodes
    assert add.target == "aten.add_.Tensor"
    assert tuple(add.refs()) == double.outputs
    assert tuple(product.refs()) == add.outputs * 2


def test_what_is_written_into_a_slice_reaches_those_who_read_the_whole():
    class Assembled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.new_empty(x.shape)
            y[..., :3] = x[..., :3] * 2
            y[..., 0] = 1
            return y + 1

    graph = trace(Assembled())
    first, second = (node for node in graph.nodes if "_scatter" in node.target)
    assert (first.target, first.args[2:5]) == ("aten.slice_scatter.default", (1, 0, 3))
    assert (second.target, second.args[2:]) == ("aten.select_scatter.default", (1, 0))
    whole = next(node for node in graph.nodes if node.target.startswith("aten.add."))
    assert next(second.refs()) == first.outputs[0]
    assert tuple(whole.refs()) == second.outputs
    assert graph.values[second.outputs[0]].shape == graph.values[first.args[0].name].shape


def test_writing_into_another_view_is_warned_of():
    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y, mask = self.linear(x), torch.zeros_like(x)
            y.transpose(0, 1).mul_(2)
            mask.transpose(0, 1).add_(1)  # no gradient passes: nothing to say
            return y * mask

    (warning,) = trace(Parts()).warnings
    assert warning.startswith("aten.mul_.Tensor at test_trace.py:")
    assert "writes into a part of a tensor" in warning


def test_regions_without_gradients_are_inlined_and_marked():
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                mask = self.linear(x) > 0
            return self.linear(x) * mask

    graph = trace(Masked())
    assert [(node.target.split(".")[1], node.differentiable) for node in graph.nodes] == [
        ("linear", False), ("gt", False), ("linear", True), ("mul", True), ("mean", True),
    ]  # fmt: skip


def test_literal_tensors_are_constants():
    class Scaled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.tensor([2.0] * WIDTH, device=x.device)

    graph = trace(Scaled())
    assert [value.kind for value in graph.values.values()].count("constant") == 1


def test_serving_has_no_loss_and_keeps_nothing():
    graph = trace(Chain(Layer(), Layer()), mode="serve")
    assert graph.values[graph.output].shape == (2, WIDTH)
    assert not any(node.saved or node.differentiable for node in graph.nodes)


def test_the_users_module_is_not_touched():
    first = Layer()
    model = Chain(first, *(Layer() for _ in range(3))).eval()
    before = copy.deepcopy(model.state_dict())
    weight = first.linear.weight
    trace(model, dtype="bf16")
    assert first.linear.weight is weight
    assert (weight.device.type, weight.dtype, model.training, len(model.layers)) == (
        "cpu",
        torch.float32,
        False,
        4,
    )
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


# --------------------------------------------------------------------------------------- repeats


@pytest.mark.parametrize(
    ("kinds", "repeats"),
    [
        ("aaaaaa", (Repeat(path="layers", traced=2, classes=(0,) * 6),)),
        ("ababab", (Repeat(path="layers", traced=2, classes=(0, 1) * 3),)),
        ("aaabbb", (Repeat(path="layers", traced=5, classes=(0, 0, 0, 3, 3, 3)),)),
        ("abbbba", (Repeat(path="layers", traced=3, classes=(0, 1, 1, 1, 1, 0)),)),
        ("aaaaab", (Repeat(path="layers", traced=6, classes=(0,) * 5 + (5,)),)),
        ("aa", ()),
        ("aabb", ()),
    ],
)
def test_lists_are_cut_to_a_prefix_with_every_kind(kinds: str, repeats: tuple[Repeat, ...]):
    model = Chain(*(Layer(layer_idx=i, swish=kind == "b") for i, kind in enumerate(kinds)))
    graph = trace(model)
    assert graph.repeats == repeats
    assert graph.warnings == ()
    traced = repeats[0].traced if repeats else len(kinds)
    assert len(graph.nodes) == 2 * traced + 1
    assert graph.parameters == len(kinds) * (WIDTH * WIDTH + WIDTH)


def test_layers_that_read_their_index_are_told_apart_by_what_they_run():
    class Fourth(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            return F.silu(y) if self.layer_idx % 4 == 3 else F.relu(y)

    graph = trace(Chain(*(Fourth(layer_idx=i) for i in range(8))))
    assert targets(graph).count("aten.silu.default") == 2
    assert graph.repeats == ()
    graph = trace(Chain(*(Fourth(layer_idx=i % 4) for i in range(16))))
    assert graph.repeats == (Repeat(path="layers", traced=4, classes=(0, 1, 2, 3) * 4),)


def test_layers_that_only_look_alike_are_traced_whole():
    class Configured(Layer):
        def __init__(self, swish: bool) -> None:
            super().__init__()
            self.config = SimpleNamespace(swish=swish)  # no scalar attribute: the key cannot see it

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            return F.silu(y) if self.config.swish else F.relu(y)

    graph = trace(Chain(*(Configured(swish=i % 2 == 1) for i in range(6))))
    assert graph.repeats == (Repeat(path="layers", traced=6, classes=(0, 1) * 3),)
    assert graph.warnings == (
        "all layers were traced one by one: layers.0 and layers.1 look alike but run different ops",
    )


def test_a_model_that_needs_all_its_layers_is_traced_whole():
    class Dense(Chain):
        def __init__(self) -> None:
            super().__init__(*(Layer() for _ in range(4)))
            self.out = nn.Linear(4 * WIDTH, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(torch.cat([layer(x) for layer in self.layers], dim=-1))

    graph = trace(Dense())
    assert targets(graph).count("aten.linear.default") == 5
    assert graph.repeats == (Repeat(path="layers", traced=4, classes=(0,) * 4),)
    assert "traced one by one: the model cannot be traced" in graph.warnings[0]


def test_lists_that_run_in_step_are_not_cut_apart():
    """Cut to its first two, one list would leave the other's later layers out."""

    class Zipped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.even = nn.ModuleList(Layer(swish=i % 2 == 1) for i in range(6))
            self.uneven = nn.ModuleList(
                Layer() if i == 2 else nn.Linear(WIDTH, WIDTH, bias=i % 2 == 1) for i in range(6)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for first, second in zip(self.even, self.uneven, strict=False):
                x = second(first(x))
            return x

    graph = trace(Zipped())
    assert targets(graph).count("aten.linear.default") == 2 * 6
    fault = "uneven.2 does not run when fewer layers of even are traced"
    assert graph.warnings == (f"all layers were traced one by one: {fault}",)


def test_sequentials_are_cut_too():
    graph = trace(nn.Sequential(*(Layer() for _ in range(5))))
    assert [(repeat.traced, len(repeat.classes)) for repeat in graph.repeats] == [(2, 5)]


def test_only_the_outermost_list_is_cut():
    layers = (Chain(*(Layer() for _ in range(3))) for _ in range(4))
    graph = trace(Chain(*layers))
    assert [repeat.path for repeat in graph.repeats] == ["layers"]
    assert targets(graph).count("aten.linear.default") == 2 * 3


# --------------------------------------------------------------------------------------- sources

GOOD = """
import torch
from torch import nn
from neighbour import WIDTH

def build_model():
    return nn.Linear(WIDTH, 4)

def tiny():
    return nn.Linear(WIDTH, 1)

def example_inputs(batch, seq):
    return (torch.randn(batch, seq, WIDTH),)
"""


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    """A model file that imports a file next to it."""
    (tmp_path / "neighbour.py").write_text("WIDTH = 3\n")
    (tmp_path / "model.py").write_text(GOOD)
    return tmp_path / "model.py"


def test_a_model_file_may_import_its_neighbours(model_file: Path, tmp_path_factory: pytest.TempPathFactory):
    assert trace_source(str(model_file), seq_len=5).parameters == 3 * 4 + 4
    assert trace_source(f"{model_file}:tiny", seq_len=5).parameters == 3 + 1
    other = tmp_path_factory.mktemp("other")
    (other / "neighbour.py").write_text("WIDTH = 30\n")
    (other / "model.py").write_text(GOOD)
    assert trace_source(str(other / "model.py"), seq_len=5).parameters == 30 * 4 + 4


def test_a_model_file_may_say_how_long_a_sequence_is(model_file: Path):
    assert trace_source(str(model_file)).seq_len == 4096
    model_file.write_text(GOOD.replace("(batch, seq):", "(batch, seq=7):"))
    assert trace_source(str(model_file)).seq_len == 7
    assert trace_source(str(model_file), seq_len=5).seq_len == 5


def test_the_loss_of_a_model_file_sees_outputs_and_inputs(model_file: Path):
    model_file.write_text(
        GOOD + "\ndef loss(outputs, inputs):\n    return (outputs - inputs[0].sum()).square().mean()\n"
    )
    graph = trace_source(str(model_file), seq_len=5)
    ops = [target.split(".")[1] for target in targets(graph)]
    assert ops == ["linear", "sum", "sub", "square", "mean"]


def test_keyword_inputs(model_file: Path):
    model_file.write_text(
        GOOD.replace("(torch.randn(batch, seq, WIDTH),)", "{'input': torch.randn(batch, WIDTH)}")
    )
    graph = trace_source(str(model_file), seq_len=5)
    assert [graph.values[name].shape for name in graph.inputs] == [(2, 3)]


def test_a_model_file_is_cached_until_it_changes(model_file: Path, tmp_path: Path):
    options = TraceOptions(seq_len=5)
    first = load_or_trace(str(model_file), options, cache_dir=tmp_path / "graphs")
    assert load_cached(str(model_file), options, cache_dir=tmp_path / "graphs") == first
    (tmp_path / "neighbour.py").write_text(
        "WIDTH = 7  # of another length: Python compiles a file of one size once a second\n"
    )
    second = load_or_trace(str(model_file), options, cache_dir=tmp_path / "graphs")
    assert (first.parameters, second.parameters) == (3 * 4 + 4, 7 * 4 + 4)
    assert first.content_hash != second.content_hash


def test_tracing_twice_gives_the_same_graph(model_file: Path):
    assert trace_source(str(model_file), seq_len=5) == trace_source(str(model_file), seq_len=5)


def test_an_export_can_be_read(tmp_path: Path):
    model = Chain(*(Layer() for _ in range(4)))
    torch.export.save(torch.export.export(model, (torch.randn(2, WIDTH),)), tmp_path / "chain.pt2")
    graph = trace_source(str(tmp_path / "chain.pt2"), seq_len=1)
    assert graph.repeats == (Repeat(path="layers", traced=4, classes=(0,) * 4),)
    assert graph.parameters == 4 * (WIDTH * WIDTH + WIDTH)
    assert [node.module for node in graph.nodes][:2] == ["layers.0.linear", "layers.0"]
    assert graph.warnings[0].startswith("chain.pt2 does not end in a loss")


BAD_FILES = {
    "syntax error": ("x = (\n", r"syntax error in model\.py:1: '\(' was never closed"),
    "fails": ("x = 1\nx.nothing\n", r"model\.py failed while it was loaded: AttributeError: .*model\.py:2"),
    "missing import": ("import no_such_thing\n", r"ModuleNotFoundError: No module named 'no_such_thing'"),
    "exits": ("import sys\nsys.exit(3)\n", r"model\.py ended the program"),
    "no factory": ("def make():\n    pass\n", r"no function build_model\(\); found make\(\)"),
    "misspelt": (GOOD.replace("build_model", "build_modle"), r"did you mean 'build_modle'"),
    "empty": ("", r"found no function"),
    "no module": (GOOD.replace("return nn.Linear(WIDTH, 4)", "return 3"), r"build_model\(\) returned int"),
    "factory fails": (GOOD.replace("WIDTH, 4", "WIDTH, -4"), r"failed: RuntimeError: .*model\.py:7"),
    "no inputs": (GOOD.replace("example_inputs", "inputs"), r"no function example_inputs\(\)"),
    "inputs fail": (GOOD.replace("torch.randn", "torch.rnd"), r"inputs\(\) failed: AttributeError"),
    "inputs take nothing": (GOOD.replace("inputs(batch, seq)", "inputs()"), "takes 0 positional"),
    "wrong inputs": (GOOD.replace("(torch.randn(batch, seq, WIDTH),)", "3"), r"returned int"),
    "no tensor": (GOOD.replace("torch.randn(batch, seq, WIDTH)", "3"), "no tensor"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_FILES)
def test_mistakes_in_a_model_file_are_one_line(model_file: Path, case: str):
    text, message = BAD_FILES[case]
    model_file.write_text(text)
    with pytest.raises(ModelError, match=message) as raised:
        trace_source(str(model_file), seq_len=5)
    assert "\n" not in str(raised.value)
    assert not isinstance(raised.value, TraceError)


BAD_FORWARDS = {
    "shapes do not match": ("seq, WIDTH", "seq, 5", r"cannot be traced: RuntimeError: .*"),
    "data-dependent": ("nn.Linear(WIDTH, 4)", "Picky()", r"cannot be traced: .*model\.py:\d+"),
    "no tensor": ("nn.Linear(WIDTH, 4)", "Silent()", r"returned no tensor but int"),
}  # fmt: skip
MODULES = """
class Picky(nn.Module):
    def forward(self, x):
        return x if x.sum().item() > 0 else -x

class Silent(nn.Module):
    def forward(self, x):
        return 3
"""


@pytest.mark.parametrize("case", BAD_FORWARDS)
def test_models_that_cannot_run_are_one_line(model_file: Path, case: str, capfd: pytest.CaptureFixture):
    old, new, message = BAD_FORWARDS[case]
    model_file.write_text(GOOD.replace(old, new) + MODULES)
    with pytest.raises(TraceError, match=message) as raised:
        trace_source(str(model_file), seq_len=5)
    assert "\n" not in str(raised.value)
    assert capfd.readouterr() == ("", "")


def test_an_unreadable_export(tmp_path: Path):
    (tmp_path / "model.pt2").write_bytes(b"not an archive")
    with pytest.raises(ModelError, match=r"model\.pt2 is no readable export"):
        trace_source(str(tmp_path / "model.pt2"), seq_len=5)


def test_an_unknown_dtype(model_file: Path):
    with pytest.raises(ModelError, match=r"unknown dtype 'bf61', .*did you mean 'bf16'"):
        trace_source(str(model_file), seq_len=5, dtype="bf61")


def test_a_module_needs_inputs():
    with pytest.raises(ModelError, match="needs example_inputs"):
        trace_source(nn.Linear(2, 2), seq_len=5)
