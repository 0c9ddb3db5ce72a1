"""Checkpoints: whole tensors by name, in pieces that any layout of ranks can read."""

from mpitrain.checkpoint.manifest import CheckpointError, Manifest, Piece, Progress
from mpitrain.checkpoint.reader import Checkpoint, newest
from mpitrain.checkpoint.writer import Writer

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "Manifest",
    "Piece",
    "Progress",
    "Writer",
    "newest",
]
