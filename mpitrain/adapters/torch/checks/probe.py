"""Samples, calls of user code, and comparisons of results, for the checks and the layers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from inspect import signature
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from mpitrain.fields import as_given, named

Tensors = Mapping[str, torch.Tensor]
#: ``f(outputs, labels)``, as torch's functional losses: tensors, or tuples or dictionaries of them,
#: as the module and the data set give them.
Function = Callable[[Any, Any], Any]
#: Makes outputs as the module gave them of outputs by name.
Form = Callable[[Mapping[str, Any]], Any]
#: Errors of functions that do not fit their arguments.
MISFITS = (RuntimeError, ValueError, TypeError, IndexError)
#: Types of numbers, least precise first.
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def is_due(calls: int) -> bool:
    """Whether the latest of ``calls`` is checked: the first, second, fourth, eighth one."""
    return calls & (calls - 1) == 0


def one_line(error: object) -> str:
    """The text of an error without line breaks."""
    return " ".join(str(error).split())


def rows(parts: Tensors, row: int) -> dict[str, torch.Tensor]:
    """The sample of this number, as a batch."""
    return {name: part.detach()[row : row + 1] for name, part in parts.items()}


def length(parts: Tensors) -> int:
    """Number of samples."""
    return len(next(iter(parts.values())))


def beside(parts: Tensors, one: Tensors, count: int = 1) -> dict[str, torch.Tensor]:
    """Samples, and after them ``count`` copies of another."""
    return {n: torch.cat([p, one[n].expand(count, *p.shape[1:])]) for n, p in parts.items()}


def cast(parts: Tensors, kind: torch.dtype | None) -> Tensors:
    """Tensors whose floating-point numbers are of this type; None: of the types that they have."""
    if kind is None:
        return parts
    return {n: part.to(kind) if part.is_floating_point() else part for n, part in parts.items()}


def alike(one: Tensors, other: Tensors, most: float | None = None) -> bool:
    """Whether the tensors are equal up to rounding, which leaves half of the digits.

    Rounding is that of numbers as large as ``most``; None: as the largest one in a tensor of the
    ``other``.
    """
    return one.keys() == other.keys() and all(
        _close(part, other[name], most) for name, part in one.items()
    )


def _close(a: torch.Tensor, b: torch.Tensor, most: float | None) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point() or not a.numel():
        return torch.equal(a, b)
    if most is None:
        most = b.abs().nan_to_num().max().item()
    return torch.allclose(a, b, rtol=0, atol=torch.finfo(a.dtype).eps ** 0.5 * most, equal_nan=True)


def backward(
    outputs: Sequence[torch.Tensor], by: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]
) -> list[torch.Tensor | None]:
    """Gradients of outputs, times ``by``, by leaves; None: the outputs do not follow from it.

    They are taken as in a loop of torch, as reentrant checkpoints ask for.
    """
    for one in wanted:
        one.grad = None
    torch.autograd.backward(outputs, by)
    found = [one.grad for one in wanted]
    for one in wanted:
        one.grad = None
    return found


@contextmanager
def having(module: torch.nn.Module, values: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """The module has these parameters and buffers within this block, under all their names."""
    places = [
        (own, key, tensor, f"{prefix}.{key}" if prefix else key)
        for prefix, part in module.named_modules()
        for own in (part._parameters, part._buffers)
        for key, tensor in own.items()
        if tensor is not None
    ]
    given = {id(tensor): values[name] for _, _, tensor, name in places if name in values}
    for own, key, tensor, _ in places:
        own[key] = given.get(id(tensor), tensor)
    try:
        yield
    finally:
        for own, key, tensor, _ in places:
            own[key] = tensor


def options(module: torch.nn.Module) -> dict[str, Any]:
    """Arguments of a module that are no data: no cache, which models of ``transformers`` can do."""
    return {"use_cache": False} if "use_cache" in signature(module.forward).parameters else {}


def arguments(
    given: Mapping[str, Any], options: Mapping[str, Any], form: Form | None = None
) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Positional and keyword arguments of a module for its inputs by name, and its options.

    ``form`` makes one argument of several inputs, as in a ``torch.nn.Sequential``.
    """
    if form or "" in given:
        return ((form or as_given)(given),), options
    return (tuple(given.values()), options) if "0" in given else ((), {**given, **options})


def outputs_of(found: Any) -> tuple[dict[str, Any], Form]:
    """Results of a module by name (:mod:`mpitrain.fields`), and what makes its result of them.

    Tuples, lists and dictionaries may have others in them, and None.  A data class or a dictionary
    with other things, as ``transformers`` have them, becomes :class:`Outputs` without these, and so
    does what has a single number, which is the module's own loss.
    """
    leaves, spec = tree_flatten(found)
    parts = {n: one for n, one in enumerate(leaves) if one is not None}
    if type(found) is dict:
        is_formed = not all(isinstance(one, torch.Tensor) for one in found.values())
    else:  # but for what an LSTM gives
        is_formed = isinstance(found, (tuple, list)) and tuple not in map(type, found)
    if not (is_formed and all(isinstance(p, torch.Tensor) and p.dim() for p in parts.values())):
        return _named_outputs(found), _as_outputs

    def form(values: Mapping[str, Any]) -> Any:
        made = dict(zip(parts, values.values(), strict=True))
        return tree_unflatten([made.get(n) for n in range(len(leaves))], spec)

    every = tuple(parts.values())
    return named(every) if len(every) != 1 else {"": every[0]}, form


class Outputs(dict[str, Any]):
    """Outputs by name, which are attributes, too, as those of a data class."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(f"the outputs have no tensor {name!r}, only {', '.join(self)}")


def _as_outputs(values: Mapping[str, Any]) -> Any:
    found = as_given(values)
    return Outputs(found) if isinstance(found, dict) else found


def _named_outputs(found: Any) -> dict[str, Any]:
    if is_dataclass(found) and not isinstance(found, Mapping):
        found = vars(found)
    if isinstance(found, Mapping):
        return named({k: part for k, part in found.items() if isinstance(part, torch.Tensor)})
    if isinstance(found, torch.Tensor):
        return {"" if found.dim() else "loss": found}
    if not isinstance(found, tuple):
        return named(found)
    parts = [part for part in found if part is not None]
    single = [isinstance(part, torch.Tensor) and not part.dim() for part in parts]
    if sum(single) != 1:
        return named(tuple(parts))
    names = ["loss" if is_loss else f"output_{n}" for n, is_loss in enumerate(single)]
    return dict(zip(names, parts, strict=True))


def expect_outputs(found: Tensors, samples: int) -> None:
    """Raise ``ValueError`` unless all outputs are dense real tensors with a row for each sample."""
    if not found:
        raise ValueError("it gives no tensor; give outputs with a row for each sample")
    for name, part in found.items():
        of = f"its output {name!r}" if name else "its output"
        if part.layout != torch.strided or part.is_quantized:
            raise ValueError(
                f"{of} is {'quantised' if part.is_quantized else part.layout}, and layers pass "
                "dense tensors alone; give to_dense() or dequantize() of it"
            )
        if not part.dim():
            raise ValueError(
                f"{of} is a single number, and no mean by torch's own losses; outputs have one for "
                "each sample: give loss=function of outputs and labels that returns (sum, count), "
                "and the module no labels"
            )
        if part.is_complex():
            raise ValueError(
                f"{of} is of {part.dtype}, and layers pass real numbers alone; put what gives "
                "complex numbers and what takes them into one module, or give view_as_real()"
            )
    counts = {name: len(part) for name, part in found.items()}
    if len({*counts.values()}) > 1:
        name, count = next(one for one in counts.items() if one[1] != samples)
        raise ValueError(
            f"its output {name!r} has {count} rows for {samples} samples; give one for each; "
            "parameters, as weights of losses, need not be outputs: the loss function may read them"
        )
