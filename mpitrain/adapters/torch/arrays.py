"""Arrays and tensors that share memory: torch and NumPy, or torch and CuPy."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from types import ModuleType
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from collectives.errors import needed
from mpitrain.arrays import Array, array_namespace
from mpitrain.config import ConfigError

T = TypeVar("T")


def as_array(tensor: torch.Tensor, xp: ModuleType = np) -> Array:
    """A tensor as an array of the same shape: on the CPU NumPy's, on a GPU CuPy's.

    It is a copy where torch only marks the numbers as conjugate or negative.

    Raises:
        ImportError: bfloat16 without ml_dtypes.
        TypeError: NumPy does not have the type, or the tensor is not where ``xp`` computes.
    """
    if xp is np and tensor.is_cpu and tensor.dtype != torch.bfloat16:
        found: Array = tensor.numpy(force=True)
        return found
    values = tensor.detach().resolve_conj().resolve_neg()
    if xp is not np:
        on_device: Array = xp.from_dlpack(values)
        return on_device
    kind = needed("ml_dtypes", "bfloat16", "a parameter of bfloat16").bfloat16
    return np.asarray(values.view(torch.int16).numpy().view(kind))


def as_tensor(array: Array) -> torch.Tensor:
    """An array as a tensor of the same shape, on the device of the array.

    Raises:
        ConfigError: the array lies on a GPU, for which this torch was not made.
    """
    if array_namespace(array) is not np:
        try:
            return torch.from_dlpack(array)
        except (RuntimeError, TypeError, ValueError) as error:
            raise ConfigError(
                f"run.device: torch {torch.__version__} cannot compute in this GPU's memory "
                f"({error}); install one with CUDA, or set run.device = 'cpu'"
            ) from error
    if array.dtype.kind != "V":  # that of bfloat16
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)


def as_tensors(arrays: Mapping[str, Array]) -> dict[str, torch.Tensor]:
    """Arrays as tensors, by name; arrays that are not contiguous are copied."""
    return {
        name: as_tensor(array_namespace(array).ascontiguousarray(array))
        for name, array in arrays.items()
    }


def tensors_of(
    arrays: Mapping[str, Array], kind: torch.dtype | None = None, *, every: bool = False
) -> dict[str, torch.Tensor]:
    """Tensors of arrays by name; numbers in records, or in ``every`` array, as wide as ``kind``."""
    found = as_tensors(arrays)
    if kind is None or not kind.is_floating_point:
        return found
    return {
        name: part.to(kind) if (every or name) and part.is_floating_point() else part
        for name, part in found.items()
    }


def named_tensors(module: torch.nn.Module, *, every: bool = False) -> dict[str, torch.Tensor]:
    """Parameters and buffers of a module by name; with ``every``, under all of their names."""
    return {
        **dict(module.named_parameters(remove_duplicate=not every)),
        **dict(module.named_buffers(remove_duplicate=not every)),
    }


def copied(value: T, memo: dict[int, Any]) -> T:
    """A deep copy of a module, or of attributes; it has the values of tensors within a graph, of
    which torch makes no copy."""
    own = [vars(part) for part in value.modules()] if isinstance(value, torch.nn.Module) else value
    for held in tree_leaves(own):
        if isinstance(held, torch.Tensor) and not held.is_leaf:
            memo.setdefault(id(held), held.detach().clone())
    return deepcopy(value, memo)


def as_bytes(tensor: torch.Tensor) -> Array:
    """The bytes of a tensor of any type, layout and device, of shape (bytes,); a copy if need be.

    It waits for a GPU.
    """
    values = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if not len(values):  # torch views no axis of stride 0, as empty ones may have
        return np.empty(0, np.uint8)
    found: Array = values.view(torch.uint8).cpu().numpy()
    return found


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of a type and shape have the same bytes."""
    return torch.equal(one, other) or np.array_equal(as_bytes(one), as_bytes(other))


#: Types of 16 bits, whose sums may overflow.
NARROW = (torch.float16, torch.bfloat16)
#: Copies of tensors on a device, by name, with the address and version of their origin; and this,
#: lest another tensor comes to lie where it was.
Moved = dict[str, tuple[tuple[int, int], torch.Tensor, torch.Tensor]]


def moved(before: Moved, name: str, constant: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A constant on a device; it is copied there once, and again when it has changed."""
    if constant.device == device:
        return constant
    is_now = constant.data_ptr(), constant._version
    if name not in before or before[name][0] != is_now:
        before[name] = is_now, constant.detach().to(device), constant.detach()
    return before[name][1]


def on_stream_of(array: Array) -> AbstractContextManager[Any]:
    """Let torch queue its work on CuPy's stream, so that neither has to wait for the other."""
    xp = array_namespace(array)
    if xp is np or not torch.cuda.is_available():
        return nullcontext()
    queue = xp.cuda.get_current_stream().ptr
    if queue == torch.cuda.current_stream().cuda_stream:
        return nullcontext()
    # torch takes the null stream's 0 for no stream at all, and would make one.
    stream = torch.cuda.ExternalStream(queue) if queue else torch.cuda.default_stream()
    found: AbstractContextManager[Any] = torch.cuda.stream(stream)
    return found
