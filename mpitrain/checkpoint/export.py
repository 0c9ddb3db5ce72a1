"""A checkpoint's parameters in one file, for other programs."""

import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from mpitrain.arrays import Array
from mpitrain.checkpoint.manifest import MANIFEST, CheckpointError
from mpitrain.checkpoint.reader import Checkpoint, newest
from mpitrain.config import Config

#: Parameters of a torch module, as mpitrain.adapters.torch.layers names them.
_OF_TORCH = re.compile(r"part\d+\.")


class Exported(NamedTuple):
    """What was written.

    Attributes:
        tensors: number of tensors.
        folder: the checkpoint's folder.
        refused: newer checkpoints that could not be used, and why.
    """

    tensors: int
    folder: Path
    refused: list[str]


def export(folder: Path, output: Path, *, torch: bool = False) -> Exported:
    """Write all parameters, whole, and what layers keep besides, to a safetensors file.

    Of a job with ``optim.average``, the averages are written in the place of the parameters.

    Args:
        folder: a checkpoint's, or a run's, of which the newest checkpoint that is whole is taken.
        output: the file.
        torch: axes in torch's order: a linear weight (out, in), a convolution's (out, in, rows,
            columns), and queries, keys and values of all heads one after another.

    Raises:
        CheckpointError: there is no checkpoint that is whole, or the file cannot be written.
    """
    checkpoint, refused = find(folder)
    tensors = {}
    for name in checkpoint.names:
        whole = checkpoint.value(name)
        own = as_torch(name, whole, checkpoint.job) if torch else whole
        tensors[name] = np.ascontiguousarray(own)
    output.parent.mkdir(parents=True, exist_ok=True)
    try:
        save_file(tensors, output, {"job": checkpoint.manifest.job})
    except SafetensorError as error:
        raise CheckpointError(f"cannot write {output}: {error}; name another file") from error
    return Exported(len(tensors), checkpoint.folder, refused)


def find(folder: Path) -> tuple[Checkpoint, list[str]]:
    """A checkpoint by its folder or its run's, and why newer ones of the run were refused.

    Raises:
        CheckpointError: it is not whole, or none of the run's is.
    """
    if (folder / MANIFEST).exists():
        checkpoint = Checkpoint(folder)
        checkpoint.verify()
        return checkpoint, []
    inside = folder / "checkpoints"
    found, refused = newest(inside if inside.is_dir() else folder)
    if found is None:
        why = f": {'; '.join(refused)}" if refused else ""
        raise CheckpointError(f"{folder} is no checkpoint and has none that is whole{why}")
    return found, refused


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
