"""Calls of modules with given parameters, on arrays."""

from collections.abc import Mapping
from typing import Any

import torch

from mpitrain.adapters.torch.arrays import as_tensors
from mpitrain.arrays import Array


def tensors_of(
    arrays: Mapping[str, Array], kind: torch.dtype | None = None
) -> dict[str, torch.Tensor]:
    """Tensors of arrays by name; numbers in records as wide as ``kind``."""
    found = as_tensors(arrays)
    if kind is None or not kind.is_floating_point:
        return found
    return {
        name: part.to(kind) if name and part.is_floating_point() else part
        for name, part in found.items()
    }


def call_with(
    module: torch.nn.Module,
    values: Mapping[str, torch.Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Outputs of a module with these parameters and buffers, under all names that they have.

    torch's ``tie_weights`` would take a part of two names for two parts, and keep its values.
    """
    own = [*module.named_parameters(), *module.named_buffers()]
    given = {id(tensor): values[name] for name, tensor in own if name in values}
    every = {
        f"{prefix}{prefix and '.'}{name}": given[id(tensor)]
        for prefix, part in module.named_modules()
        for name, tensor in (*part._parameters.items(), *part._buffers.items())
        if id(tensor) in given
    }
    return torch.func.functional_call(module, every, args, kwargs, tie_weights=False)


def expect_outputs(found: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` unless all outputs are dense real tensors with a row for each sample."""
    for name, part in found.items():
        of = f"its output {name!r}" if name else "its output"
        if not isinstance(part, torch.Tensor):
            raise ValueError(
                f"{of} is a {type(part).__name__}; all outputs are tensors; of an LSTM, put it "
                "into a module that gives what is needed: return self.lstm(x)[0]"
            )
        if part.layout != torch.strided or part.is_quantized:
            raise ValueError(
                f"{of} is {'quantised' if part.is_quantized else part.layout}, and layers pass "
                "dense tensors alone; give to_dense() or dequantize() of it"
            )
        if not part.dim():
            raise ValueError(f"{of} is a single number; outputs have one for each sample")
        if part.is_complex():
            raise ValueError(
                f"{of} is of {part.dtype}, and layers pass real numbers alone; put what gives "
                "complex numbers and what takes them into one module, or give view_as_real()"
            )
