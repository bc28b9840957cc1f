"""Tests that need an NVIDIA GPU: skipped, with the reason, where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what lies in this folder unless a CUDA device can be used."""
    if torch.cuda.is_available():
        return
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
