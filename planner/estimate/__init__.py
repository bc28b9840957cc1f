"""Estimates: kernels (`compute`), collectives (`collectives`) and what software adds (`frameworks`)."""
