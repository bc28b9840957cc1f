"""Readers of what people already have: `nvidia-smi topo -m` pastes, nccl-tests logs, this machine.

`smi` makes a link graph of a paste, `hierarchy` nests its devices into levels, `nccl_tests` makes
curves of a log, `detect` looks at the local machine, and `draft` writes a topology file of it all.
Nothing here needs torch or an accelerator.
"""
