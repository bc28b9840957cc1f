"""Bundled hardware descriptions and their loader: devices, clusters, measured curves.

Importing this is cheap: YAML and pydantic are loaded with the first file.
"""

from .load import list_devices, list_topologies, load, load_device, load_file, topology_hash

__all__ = ["list_devices", "list_topologies", "load", "load_device", "load_file", "topology_hash"]
