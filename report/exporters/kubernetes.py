"""Kubernetes: a PyTorchJob of the Kubeflow training operator that runs the torchrun script."""

from __future__ import annotations

import re
from typing import Any

import yaml

from ...planner.plan import Plan
from .facts import headline, nodes_and_devices
from .registry import Exported, exporter
from .torchrun import launch_script, train_script

NAME = "kubernetes"
IMAGE = "REGISTRY/IMAGE:TAG"
"""What the user must replace: an image with torch, tpplan, the model file and the scripts in /workspace."""
LONGEST_NAME = 50
"""Characters of a name that leave room for the operator's suffixes below Kubernetes' 63."""


@exporter(NAME, "a PyTorchJob around the torchrun script")
def export(plan: Plan) -> Exported:
    """`pytorchjob.yaml`, with `run.sh` and `train.py` that its image must hold."""
    return Exported(
        files={
            "pytorchjob.yaml": job_text(plan, model="model.py"),
            "run.sh": launch_script(plan),
            "train.py": train_script(plan),
        },
        deviations=(
            f"the image ({IMAGE}), the model file and the shared memory volume are the cluster's to give",
        ),
    )


def job_text(plan: Plan, *, model: str | None) -> str:
    """A PyTorchJob that runs `run.sh`, told of the model file if there is one, as YAML."""
    return f"# {headline(plan)}\n" + yaml.safe_dump(_job(plan, model), sort_keys=False)


def _job(plan: Plan, model: str | None) -> dict[str, Any]:
    nodes, per_node = nodes_and_devices(plan)
    variables = [{"name": "MODEL", "value": model}] if model else []
    variables.append({"name": "PLAN", "value": "plan.yaml"})
    replicas = {"Master": _replica(1, per_node, variables)}
    if nodes > 1:
        replicas["Worker"] = _replica(nodes - 1, per_node, variables)
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": _name(plan)},
        "spec": {"nprocPerNode": str(per_node), "pytorchReplicaSpecs": replicas},
    }


def _replica(number: int, per_node: int, variables: list[dict[str, str]]) -> dict[str, Any]:
    container = {
        "name": "pytorch",
        "image": IMAGE,
        "workingDir": "/workspace",
        "command": ["bash", "run.sh"],
        "env": [dict(variable) for variable in variables],
        "resources": {"limits": {"nvidia.com/gpu": per_node}},
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    volumes = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    return {
        "replicas": number,
        "restartPolicy": "OnFailure",
        "template": {"spec": {"containers": [container], "volumes": volumes}},
    }


def _name(plan: Plan) -> str:
    """The model's name as Kubernetes allows it: lower-case letters, digits and hyphens."""
    word = re.sub(r"[^a-z0-9]+", "-", plan.model.name.lower()).strip("-")[:LONGEST_NAME].strip("-")
    return f"tpplan-{word or 'model'}"
