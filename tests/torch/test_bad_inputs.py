"""Whatever a user gets wrong ends in exit code 2, one line on stderr that names it, and no traceback."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from tpplan import cli

GOOD_MODEL = """
import torch

def build_model():
    return torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))

def build_pair():
    return build_model(), build_model()

def example_inputs(batch, seq):
    return (torch.zeros(batch, 64),)
"""
BUILD = GOOD_MODEL.split("def build_pair")[0]
GOOD_CLUSTER = """
name: mine
device: a100-sxm4-80gb
levels:
  - {name: node, size: 8, kind: nvlink, gb_per_s: 300, latency_us: 1, efficiency: 0.7}
  - {name: cluster, size: 2, kind: infiniband, gb_per_s: 25, latency_us: 5, efficiency: 0.8}
"""

FILES = {
    "good.py": GOOD_MODEL,
    "syntax.py": "import torch\n\ndef build_model(:\n    pass\n",
    "raises.py": "raise RuntimeError('no licence found')\n",
    "exits.py": "import sys\nsys.exit('usage: train.py DATA')\n",
    "imports.py": "import torhc\n",
    "no_factory.py": "import torch\n\ndef make_net():\n    return torch.nn.Linear(2, 2)\n",
    "not_callable.py": "build_model = 3\n\ndef example_inputs(batch, seq):\n    return ()\n",
    "not_a_module.py": GOOD_MODEL.replace("return torch.nn.Sequential(", "return 42, ("),
    "factory_raises.py": "def build_model():\n    raise ValueError('hidden size 7')\n\n"
    "def example_inputs(batch, seq):\n    return ()\n",
    "no_inputs.py": BUILD,
    "inputs_raise.py": BUILD + "def example_inputs(batch, seq):\n    raise OSError('no tokenizer')\n",
    "inputs_wrong_type.py": BUILD + "def example_inputs(batch, seq):\n    return 'a string'\n",
    "inputs_wrong_signature.py": BUILD + "def example_inputs():\n    return (torch.zeros(2, 64),)\n",
    "inputs_wrong_shape.py": BUILD
    + "def example_inputs(batch, seq):\n    return (torch.zeros(batch, 63),)\n",
    "empty.py": "",
    "model.onnx": "x",
    "broken.pt2": "not an archive",
    "empty_dir/README": "",
    "broken_json/config.json": "{",
    "wrong_type/config.json": '{"model_type": "gpt9"}',
    "no_type/config.json": '{"hidden_size": 8}',
    "good.yaml": GOOD_CLUSTER,
    "indent.yaml": "name: mine\n  device: [\n",
    "list.yaml": "- 1\n- 2\n",
    "empty.yaml": "",
    "field.yaml": GOOD_CLUSTER + "colour: blue\n",
    "level_field.yaml": GOOD_CLUSTER.replace("latency_us: 5", "latency_ms: 5"),
    "negative.yaml": GOOD_CLUSTER.replace("gb_per_s: 25", "gb_per_s: -25"),
    "word.yaml": GOOD_CLUSTER.replace("gb_per_s: 25", "gb_per_s: fast"),
    "device.yaml": GOOD_CLUSTER.replace("a100-sxm4-80gb", "a100-sxm4-80bg"),
    "plan.yaml": "version: 99\n",
    "notes.yaml": "just some words\n",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bad:
    """A command line and what its message must name."""

    line: str
    named: tuple[str, ...]


def model(file: str, *named: str) -> Bad:
    """A bad model under good options."""
    return Bad(line=f"suggest {file} -t dgx-h100", named=named or (file,))


def topology(spec: str, *named: str) -> Bad:
    """A good model on a bad topology."""
    return Bad(line=f"suggest good.py -t {spec}", named=named or (spec,))


def option(words: str, *named: str) -> Bad:
    """A bad option of `suggest`, all else good; the cluster has 64 devices."""
    return Bad(line=f"suggest good.py -t dgx-h100:8 {words}", named=named or (words.split()[-1],))


def estimate(words: str, *named: str) -> Bad:
    """A bad option of `estimate`."""
    return Bad(line=f"estimate good.py -t dgx-h100:8 {words}", named=named)


BAD = [
    model("missing.py"),
    model("missing_dir/config.json"),
    model("syntax.py", "syntax.py", "3"),
    model("raises.py", "raises.py", "no licence found"),
    model("exits.py", "exits.py", "ended the program"),
    model("imports.py", "imports.py", "torhc"),
    model("no_factory.py", "no_factory.py", "build_model", "make_net"),
    model("not_callable.py", "build_model"),
    model("not_a_module.py", "build_model", "tuple"),
    model("good.py:build_modle", "build_modle", "build_model"),
    model("good.py:build_pair", "build_pair", "tuple"),
    model("factory_raises.py", "build_model", "hidden size 7"),
    model("no_inputs.py", "no_inputs.py", "example_inputs"),
    model("inputs_raise.py", "example_inputs", "no tokenizer"),
    model("inputs_wrong_type.py", "example_inputs", "str"),
    model("inputs_wrong_signature.py", "example_inputs"),
    model("inputs_wrong_shape.py", "63"),
    model("empty.py", "empty.py", "build_model"),
    model("model.onnx", "model.onnx", ".py"),
    model("broken.pt2"),
    model("empty_dir", "empty_dir", "config.json"),
    model("broken_json", "config.json"),
    model("wrong_type", "gpt9"),
    model("no_type", "config.json", "model_type"),
    topology("dgx-h1000", "dgx-h1000", "dgx-h100"),
    topology("dgx-h100:0", "dgx-h100:0"),
    topology("dgx-h100:x", "dgx-h100:x"),
    topology("dgx-h100:-4", "dgx-h100:-4"),
    topology("missing.yaml"),
    topology("indent.yaml"),
    topology("list.yaml"),
    topology("empty.yaml"),
    topology("field.yaml", "field.yaml", "colour"),
    topology("level_field.yaml", "latency_ms", "latency_us"),
    topology("negative.yaml", "negative.yaml", "gb_per_s", "-25"),
    topology("word.yaml", "word.yaml", "gb_per_s", "fast"),
    topology("device.yaml", "a100-sxm4-80bg", "a100-sxm4-80gb"),
    topology("dgx-h100 --nodes 0", "nodes 0"),
    topology("dgx-h100 --nodes -1", "nodes -1"),
    topology("dgx-h100 --nodes many", "--nodes many"),
    topology("dgx-h100:8 --nodes 4", "8", "4"),
    topology("dgx-1-v100 --dtype bf16", "bf16", "fp16"),
    option("--global-batch 0", "global batch 0"),
    option("--global-batch -8", "global batch -8"),
    option("--global-batch 8.5", "--global-batch 8.5"),
    option("--global-batch 100 --set dp=64", "100", "dp=64", "64 or 128"),
    option("--global-batch 64 --set dp=16,micro_batch=8", "64", "micro_batch=8", "128"),
    option("--seq-len 0", "sequence length 0"),
    option("--seq-len -128", "sequence length -128"),
    option("--dtype bfloat16", "bfloat16", "bf16"),
    option("--optimizer adam", "adam", "adamw"),
    option("--framework megaton", "megaton", "megatron"),
    option("--mode serve", "good", "no causal attention"),
    option("--mode trian", "trian", "train"),
    option("--objective quality", "quality", "throughput", "cost"),
    option("--objective speed", "speed", "throughput"),
    option("--set tp=8,pp=4,dp=3", "tp=8,pp=4,dp=3", "96", "64", "dp=2"),
    option("--set tp=3", "tp=3", "tp=4"),
    option("--set tp=128", "tp=128", "tp=64"),
    option("--set tpp=8", "tpp", "tp"),
    option("--set tp=eight", "tp=eight"),
    option("--set tp=0", "tp=0"),
    option("--set tp8", "tp8", "key=value"),
    option("--set tp=8,tp=4", "tp", "twice"),
    option("--set tp=8 --set tp=4", "tp", "twice"),
    option("--set cp=2", "cp=2", "no token ids", "available: cp=1"),
    option("--set zero=5", "zero=5", "3"),
    option("--set recompute=some", "recompute=some", "selective"),
    option("--set schedule=2f2b", "schedule=2f2b", "1f1b"),
    option("--top 0", "top 0"),
    option("--time-limit -1", "time limit -1"),
    option("--time-limit nan", "time limit nan"),
    option("--time-limit soon", "--time-limit soon"),
    option("-o missing_dir/plan.yaml", "missing_dir"),
    option("-o empty_dir", "empty_dir", "directory"),
    option("--colour"),
    estimate("", "--plan", "--set"),
    estimate("--set dp=64 --plan plan.yaml", "--plan", "--set"),
    estimate("--plan missing.yaml", "missing.yaml"),
    estimate("--plan plan.yaml", "plan.yaml", "99"),
    estimate("--plan notes.yaml", "notes.yaml"),
    estimate("--set tp=8,pp=8,dp=2", "128", "64", "dp=1"),
    Bad(line="sugest good.py -t dgx-h100", named=("sugest", "suggest")),
    Bad(line="suggest -t dgx-h100", named=("MODEL",)),
    Bad(line="suggest good.py", named=("--topology",)),
    Bad(line="topology show dgx-h10", named=("dgx-h10", "dgx-h100")),
    Bad(line="topology show dgx-h100:none", named=("none",)),
]


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with every file that the table names."""
    root = tmp_path_factory.mktemp("desk")
    for name, text in FILES.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.line)
def test_bad_input(bad: Bad, desk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(desk)
    code = cli.main(bad.line.split())
    out, err = capsys.readouterr()
    assert code == 2, err
    assert out == ""
    check_message(err, bad.named)


def check_message(err: str, named: tuple[str, ...]) -> None:
    """One short message, which names everything it should."""
    assert "tpplan: error: " in err and "Traceback" not in err and "bug in tpplan" not in err, err
    message = err.split("tpplan: error: ")[-1]
    assert len(message) < 1500, message
    for name in named:
        assert name in message, f"{name!r} is not in {message!r}"


@pytest.mark.parametrize(
    "line", ["suggest syntax.py -t dgx-h100 --json", "suggest good.py -t dgx-h100 --seq-len 0"]
)
def test_bad_input_in_a_process_of_its_own(line: str, desk: Path):
    command = [sys.executable, "-m", "tpplan", *line.split()]
    result = subprocess.run(command, cwd=desk, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (2, ""), result.stderr
    assert result.stderr.startswith("tpplan: error: ") and "Traceback" not in result.stderr
