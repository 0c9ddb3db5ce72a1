"""Check that tensors of a module lie apart: in torch, those in one memory change together."""

from collections.abc import Iterator
from ctypes import c_char
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.utils._pytree import tree_leaves

from mpitrain.adapters.torch.checks.module_class import ImpureModule, moves
from mpitrain.arrays import Array


class _Piece(NamedTuple):
    """A tensor of a module.

    Attributes:
        start, end: addresses of the first byte and behind the last one.
        name: name in the module.
        owner: key of the tensor, equal for all of its names.
        tensor: the tensor.
        changes: whether training changes it.
    """

    start: int
    end: int
    name: str
    owner: object
    tensor: torch.Tensor
    changes: bool


def expect_apart(module: nn.Module) -> None:
    """Check that no tensor that training changes shares memory with another one.

    A layer has values of its own for each tensor, so that one memory of torch would be trained as
    two.  A ``Parameter`` with several names is one tensor; views without common elements are apart.

    Raises:
        ImpureModule: two tensors do, with both names.
    """
    pieces = sorted(_pieces(module), key=lambda piece: piece[:2])
    for index, one in enumerate(pieces):
        if one.changes and _overlaps_itself(one.tensor):
            raise ImpureModule(
                f"{one.name} has several elements in one place of memory, as expand() makes them, "
                "which no optimizer can update one by one; clone() it"
            )
        for other in pieces[index + 1 :]:
            if other.start >= one.end:
                break
            if other.owner == one.owner or not (one.changes or other.changes):
                continue
            if _share(one, other):
                names = " and ".join(sorted((one.name, other.name)))
                raise ImpureModule(
                    f"{names} are two tensors in one memory, which the trainer would train apart; "
                    "make them one parameter (b.weight = a.weight, not nn.Parameter(a.weight) or "
                    ".data), compute views in forward(), or clone() one of them"
                )


def _pieces(module: nn.Module) -> Iterator[_Piece]:
    for prefix, part in module.named_modules():
        for name, tensor, owner, changes in _of(part, module.training):
            if (
                isinstance(tensor, torch.Tensor)
                and not nn.parameter.is_lazy(tensor)
                and (tensor.layout, tensor.device.type) == (torch.strided, "cpu")
                and tensor.numel()
            ):
                start = tensor.data_ptr()
                steps = zip(tensor.shape, tensor.stride(), strict=True)
                length = 1 + sum((size - 1) * step for size, step in steps)
                end = start + length * tensor.element_size()
                full = f"{prefix}{prefix and '.'}{name}"
                yield _Piece(start, end, full, owner, tensor, changes)


def _of(part: nn.Module, training: bool) -> Iterator[tuple[str, object, object, bool]]:
    """Names, values and owners of a part's own attributes, and whether training changes them."""
    for name, parameter in part._parameters.items():
        if parameter is not None:
            yield name, parameter, id(parameter), parameter.requires_grad
    runs = moves(part, training)
    for name, buffer in part._buffers.items():
        yield name, buffer, (id(part if runs else buffer), "buffer"), runs
    # The old spectral_norm begins with an alias, and sets it anew before each pass.
    hooks = part._forward_pre_hooks.values()
    anew = {hook.name for hook in hooks if isinstance(hook, SpectralNorm)}
    for name, value in vars(part).items():
        if name not in {"_parameters", "_buffers", "_modules", *anew}:
            for held in tree_leaves(value):
                yield name, held, id(held), False


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two elements may lie in one place, by the steps of the axes."""
    reach = 0
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if step <= reach:
                return True
            reach += step * (size - 1)
    return False


def _share(one: _Piece, other: _Piece) -> bool:
    """Whether they have an element in common, or the question is too hard."""
    work: Any = 100_000  # NumPy 2.4 knows no type of it but -1 and 0
    try:
        return np.shares_memory(_place(one), _place(other), max_work=work)
    except RuntimeError:  # NumPy's TooHardError
        return True


def _place(piece: _Piece) -> Array:
    """The memory of a tensor of any type as a NumPy array."""
    size = piece.tensor.element_size()
    memory: Any = (c_char * (piece.end - piece.start)).from_address(piece.start)
    steps = tuple(step * size for step in piece.tensor.stride())
    return np.ndarray(piece.tensor.shape, f"V{size}", memory, 0, steps)
