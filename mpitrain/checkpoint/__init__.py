"""Checkpoints: whole tensors by name, in pieces that any layout of ranks can read."""
