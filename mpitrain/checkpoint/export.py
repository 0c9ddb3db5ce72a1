"""A checkpoint's parameters in one file, for other programs."""

import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from collectives.files import check_regular
from mpitrain.arrays import Array
from mpitrain.checkpoint.changes import name_of_file
from mpitrain.checkpoint.manifest import MANIFEST, CheckpointError
from mpitrain.checkpoint.reader import CheckpointReader, newest
from mpitrain.config import Config
from mpitrain.files import write_whole

#: Parameters of a torch module, as mpitrain.adapters.torch.layers names them.
_OF_TORCH = re.compile(r"part\d+\.")


class Exported(NamedTuple):
    """Result of an export.

    Attributes:
        tensors: number of tensors.
        folder: the checkpoint's folder.
        refused: newer checkpoints that could not be used, and why.
    """

    tensors: int
    folder: Path
    refused: list[str]


def export(folder: Path, output: Path, *, torch: bool = False) -> Exported:
    """Writes all parameters and layers' other arrays, whole, to a safetensors file.

    With ``optim.average``, the averages take the place of the parameters.

    Args:
        folder: folder of a checkpoint, or of a run, whose newest whole checkpoint is taken.
        output: file to write, or a folder that is there, which gets ``model.safetensors``, as
            beside a ``config.json`` of Hugging Face.
        torch: write for torch.  A torch module gives its whole ``state_dict``, with frozen
            parameters and buffers.  Other models keep their names, and have axes in torch's order:
            linear weights (out, in), those of convolutions (out, in, rows, columns), and queries,
            keys and values of all heads one after another.

    Raises:
        CheckpointError: there is no checkpoint that is whole, its constants are not there, or the
            file cannot be written.
    """
    checkpoint, refused = find(folder)
    if output.is_dir():
        output /= "model.safetensors"
    if torch and checkpoint.manifest.names:
        return Exported(_of_module(checkpoint, output), checkpoint.folder, refused)
    tensors = {}
    for name in checkpoint.names:
        whole = checkpoint.value(name)
        own = as_torch(name, whole, checkpoint.job) if torch else whole
        tensors[name] = np.asarray(own, order="C")
    _write(save_file, tensors, output, job=checkpoint.manifest.job)
    return Exported(len(tensors), checkpoint.folder, refused)


def _write(save: Any, tensors: dict[str, Any], output: Path, **about: str) -> None:
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        if output.exists():
            check_regular(output)  # the new file would take the place of a device
        write_whole(output.resolve(), lambda beside: save(tensors, beside, about))
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or error
        raise CheckpointError(f"cannot write {output}: {why}; name another file") from error


def _of_module(checkpoint: CheckpointReader, output: Path) -> int:
    """Writes the ``state_dict`` of a torch module; returns its number of tensors."""
    try:
        from safetensors.torch import save_file as save_tensors
        from torch import from_numpy
    except ImportError as error:
        raise CheckpointError(
            f"{checkpoint.folder} is of a torch module, whose state_dict is written by torch; "
            "install it, or leave --torch out"
        ) from error
    names = checkpoint.manifest.names
    constants = read_constants(checkpoint)
    tensors = {
        name: from_numpy(np.asarray(checkpoint.value(own), order="C"))
        if own in checkpoint.manifest.shapes
        else constants[own].clone()
        for name, own in names.items()
    }
    for name, tensor in tensors.items():
        if name.endswith("num_batches_tracked"):
            tensors[name] = tensor.long()
    # transformers before version 5 refuses a file that does not name its format.
    _write(save_tensors, tensors, output, job=checkpoint.manifest.job, format="pt")
    return len(tensors)


def read_constants(checkpoint: CheckpointReader) -> dict[str, Any]:
    """Constants of a module, from the file that a run's checkpoints share."""
    name = checkpoint.manifest.constants
    if not name:
        return {}
    # Checkpoints of an earlier run were moved one folder down.
    places = [folder / name for folder in checkpoint.folder.resolve().parents[:2]]
    path = next((path for path in places if path.is_file()), None)
    if path is None:
        raise CheckpointError(
            f"{checkpoint.folder} has no frozen parameters and constant buffers itself, and "
            f"{places[0]} is not there; copy that file of the run's checkpoints beside it"
        )
    from safetensors.torch import load_file

    try:
        found = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if name_of_file(found) != name:
        raise CheckpointError(f"{path} is not what was written: its values differ from its name")
    return found


def find(folder: Path) -> tuple[CheckpointReader, list[str]]:
    """A whole checkpoint in its folder or its run's, and why newer ones were refused.

    CheckpointError: there is none.
    """
    if (folder / MANIFEST).exists():
        checkpoint = CheckpointReader(folder)
        checkpoint.verify()
        return checkpoint, []
    inside = folder / "checkpoints"
    found, refused = newest(inside if inside.is_dir() else folder)
    if found is None:
        why = f": {'; '.join(refused)}" if refused else ""
        raise CheckpointError(f"{folder} is no checkpoint and has none that is whole{why}")
    return found, refused


def as_torch(name: str, values: Array, job: Config) -> Array:
    """A parameter with its axes in torch's order."""
    if _OF_TORCH.match(name):
        return values
    if job.model.kind == "gpt" and ".qkv." in name:
        width = job.model.width // job.model.heads
        apart = values.reshape(*values.shape[:-1], job.model.heads, 3, width)
        values = np.moveaxis(apart, -2, -3).reshape(values.shape)
    if not name.endswith(".weight") or values.ndim < 2:
        return values
    return values.T if values.ndim == 2 else values.transpose(3, 2, 0, 1)
