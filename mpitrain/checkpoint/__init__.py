"""Checkpoints: whole tensors by name, in pieces that any layout of ranks can read."""

from mpitrain.checkpoint.manifest import CheckpointError, Manifest, Progress, SavedPiece
from mpitrain.checkpoint.reader import CheckpointReader, newest
from mpitrain.checkpoint.writer import Writer

__all__ = [
    "CheckpointReader",
    "CheckpointError",
    "Manifest",
    "SavedPiece",
    "Progress",
    "Writer",
    "newest",
]
