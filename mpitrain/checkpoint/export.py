"""A checkpoint's parameters in one file, for other programs."""

import re
from pathlib import Path

import msgspec
import numpy as np
from safetensors.numpy import save_file

from mpitrain.checkpoint.manifest import CheckpointError
from mpitrain.checkpoint.reader import Checkpoint
from mpitrain.config import Config
from mpitrain.nn import Array

#: Parameters of a torch module, as mpitrain.adapters.torch.layers names them.
_OF_TORCH = re.compile(r"part\d+\.")


def export(folder: Path, output: Path, *, torch: bool = False) -> int:
    """Write all parameters, whole, to a safetensors file; returns how many there are.

    Args:
        folder: a checkpoint's, or a run's, of which the newest checkpoint is taken.
        output: the file.
        torch: axes in torch's order: a linear weight (out, in), a convolution's (out, in, rows,
            columns), and queries, keys and values of all heads one after another.

    Raises:
        CheckpointError: there is no checkpoint that is whole.
    """
    if not (folder / "manifest.json").exists():
        inside = folder / "checkpoints" if (folder / "checkpoints").is_dir() else folder
        found = sorted(inside.glob("step-*"))
        if not found:
            raise CheckpointError(f"{folder} is no checkpoint and has none")
        folder = found[-1]
    checkpoint = Checkpoint(folder)
    checkpoint.verify()
    job = msgspec.json.decode(checkpoint.manifest.job, type=Config)
    tensors = {}
    for name in checkpoint.manifest.shapes:
        whole = checkpoint.tensor("parameters", name)
        tensors[name] = np.ascontiguousarray(as_torch(name, whole, job) if torch else whole)
    output.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, output, {"job": checkpoint.manifest.job})
    return len(tensors)


def as_torch(name: str, values: Array, job: Config) -> Array:
    """A parameter with its axes as torch has them, as those of torch's own modules are."""
    if _OF_TORCH.match(name):
        return values
    if job.model.kind == "gpt" and ".qkv." in name:
        width = job.model.width // job.model.heads
        apart = values.reshape(*values.shape[:-1], job.model.heads, 3, width)
        values = np.moveaxis(apart, -2, -3).reshape(values.shape)
    if not name.endswith(".weight") or values.ndim < 2:
        return values
    return values.T if values.ndim == 2 else values.transpose(3, 2, 0, 1)
