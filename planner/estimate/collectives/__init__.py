"""tpplan: see the module list in docs."""
