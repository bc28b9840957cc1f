"""tpplan: plan how to split any PyTorch model over a cluster, say why, and apply it."""

__version__ = "0.1.0"
