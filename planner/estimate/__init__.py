"""Seconds and bytes of a candidate: compute, collectives and memory, each tagged with its origin."""
