"""The device that computes: the CPU or a GPU, chosen once; no other room asks which."""

from mpitrain.device.choice import choose
from mpitrain.device.host import HOST, Device, Later

__all__ = ["HOST", "Device", "Later", "choose"]
