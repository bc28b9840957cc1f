"""Measures the real cluster, so that plans rest on it.

`run` is the table of contents: `discovery` finds hosts, devices and levels, `compute` and `collective`
measure, `journal` keeps what was measured so far, `profile_file` makes a topology file of it,
`below_class` says where the machine is slower than its kind. Works in one process or under torchrun.
"""
