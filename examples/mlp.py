"""A classifier with one hidden layer: 784 pixels, 4096 hidden units, 10 classes."""

import torch
import torch.nn.functional as F
from torch import nn


class Classifier(nn.Module):
    """Features (batch, inputs) -> logits (batch, classes)."""

    def __init__(self, inputs: int = 784, hidden: int = 4096, classes: int = 10) -> None:
        super().__init__()
        self.up = nn.Linear(inputs, hidden)
        self.down = nn.Linear(hidden, classes)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The loss: mean cross-entropy of the labels."""
        return F.cross_entropy(self.down(F.relu(self.up(x))), labels)


def build_model() -> Classifier:
    """3.3 million parameters."""
    return Classifier()


def example_inputs(batch: int, seq: int) -> dict[str, torch.Tensor]:
    """Random images and labels; there is no sequence."""
    return {"x": torch.randn(batch, 784), "labels": torch.randint(0, 10, (batch,))}
