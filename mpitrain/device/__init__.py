"""Where a job's arrays are and who computes with them, chosen once; no other room asks which."""

from mpitrain.device.choice import choose
from mpitrain.device.host import HOST, Device, Host, Later

__all__ = ["HOST", "Device", "Host", "Later", "choose"]
