"""A click predictor in the manner of DLRM, one of whose embedding tables exceeds any device.

13 dense features pass a small MLP; 1.6 billion users and a few small tables are embedded in 128
dimensions; pairwise dot products and the dense vector go to the top MLP.
"""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn

DENSE_FEATURES = 13
USERS = 1_600_000_000
SMALL_TABLES = (2_000_000, 500_000, 40_000, 1_500)


def mlp(*sizes: int) -> nn.Sequential:
    """Linear layers with a ReLU between each two."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Recommender(nn.Module):
    """Dense features (batch, 13), ids (batch, tables) and clicks (batch,) -> the loss."""

    def __init__(
        self, tables: tuple[int, ...] = (USERS, *SMALL_TABLES), dim: int = 128, hidden: int = 1024
    ) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, dim) for rows in tables)
        self.bottom = mlp(DENSE_FEATURES, 512, 256, dim)
        pairs = len(tables) * (len(tables) + 1) // 2
        self.top = mlp(dim + pairs, hidden, hidden, 512, 1)

    def forward(self, dense: torch.Tensor, ids: torch.Tensor, clicks: torch.Tensor) -> torch.Tensor:
        """Binary cross-entropy of the clicks."""
        x = F.relu(self.bottom(dense))
        embedded = [table(column) for table, column in zip(self.tables, ids.unbind(1), strict=True)]
        features = torch.stack([x, *embedded], dim=1)
        score = self.top(torch.cat([x, self.interactions(features)], dim=1)).squeeze(1)
        return F.binary_cross_entropy_with_logits(score, clicks)

    def interactions(self, features: torch.Tensor) -> torch.Tensor:
        """Dot product of each two different features; features is (batch, count, dim)."""
        products = torch.bmm(features, features.transpose(1, 2))
        count = features.shape[1]
        row, column = torch.tril_indices(count, count, offset=-1, device=features.device)
        return products[:, row, column]


def build_model() -> Recommender:
    """205 billion parameters: the user table alone is 409.6 GB in bf16."""
    return Recommender()


def example_inputs(batch: int, seq: int) -> dict[str, torch.Tensor]:
    """Random features, ids and clicks; there is no sequence."""
    ids = [torch.randint(0, rows, (batch,)) for rows in (USERS, *SMALL_TABLES)]
    return {
        "dense": torch.randn(batch, DENSE_FEATURES),
        "ids": torch.stack(ids, dim=1),
        "clicks": torch.randint(0, 2, (batch,)).float(),
    }
