"""Calls between processes. So far: device maps, and what can be wrong with them."""

from .device_map import Device, NodeDevices, device_list, find_problem, reverse_maps


__all__ = ["Device", "NodeDevices", "device_list", "find_problem", "reverse_maps"]
