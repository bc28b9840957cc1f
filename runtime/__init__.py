"""From a `Plan` to a model that trains as the plan says, on torch.distributed.

In: the user's `nn.Module`, a `Plan`, the process group. Out: a `Parallel` (see `parallel.py`).
The rooms of `planner/` are seen through their nouns alone.
"""
