"""Checkpoints: whole tensors by name, in pieces that any layout of ranks can read."""

from mpitrain.checkpoint.manifest import CheckpointError, Manifest, Progress, SavedPiece
from mpitrain.checkpoint.reader import Checkpoint, newest
from mpitrain.checkpoint.writer import Writer

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "Manifest",
    "SavedPiece",
    "Progress",
    "Writer",
    "newest",
]
