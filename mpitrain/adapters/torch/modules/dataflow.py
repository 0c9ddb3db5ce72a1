"""Follow values through a computation: which tensors a result is computed from."""

from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

#: Labels, of the caller's choice, of all that a value is computed from.
Origins = frozenset[Hashable]
_NONE: Origins = frozenset()


class DrawnNumbers(NamedTuple):
    """The origin of random numbers: the number of the operation that drew them."""

    number: int


#: Methods that take values out of torch's sight.
_OUT_OF_SIGHT = (torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__)


class Dataflow(TorchDispatchMode):
    """A context within which each operation hands the origins of its inputs on to its results.

    Origins belong to memory: a view has those of its base, and an operation in place adds to them.
    A tensor of which only the shape is read (``zeros_like``) is no origin.  It costs one call of
    Python for each operation, and keeps all tensors in memory until it is dropped.

    Attributes:
        steering: origins of values that Python's own control flow has read, or may have read.
        is_wrapped: whether a tensor stands for one sample of those that vmap or its like has.
    """

    is_wrapped = staticmethod(torch._C._functorch.is_functorch_wrapped_tensor)

    def __init__(self) -> None:
        super().__init__()
        self.steering = _NONE
        self._found: dict[int, Origins] = {}
        self._alive: list[torch.Tensor] = []  # or an address might come again
        self._reads = _Reads(self)

    def __enter__(self) -> "Dataflow":
        self._reads.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._reads.__exit__(*error)

    def of(self, every: Iterable[torch.Tensor]) -> Origins:
        """All origins of these tensors."""
        return _NONE.union(*(self._found.get(_memory(one), _NONE) for one in every))

    def begin(self, tensor: torch.Tensor, label: Hashable) -> None:
        """Let a tensor follow from ``label`` alone."""
        self._alive.append(tensor)
        self._found[_memory(tensor)] = frozenset([label])

    def add(self, tensor: torch.Tensor, origins: Origins) -> None:
        """Let a tensor follow from these, too."""
        self._alive.append(tensor)
        self._found[_memory(tensor)] = self.of([tensor]) | origins

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = function.overloadpacket.__name__
        takes_values = not name.endswith("_like") and not name.startswith("new_")
        origins = self.of(tensors((args, kwargs))) if takes_values else _NONE
        before = torch.get_rng_state()
        found = function(*args, **kwargs or {})
        if not torch.equal(before, torch.get_rng_state()):
            origins |= {DrawnNumbers(len(self._alive))}
        if {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(function.tags):
            self.steering |= origins
        for tensor in tensors(found):
            self.add(tensor, origins)
        return found


class _Reads(TorchFunctionMode):
    """Notices functions that no operation of torch shows."""

    def __init__(self, flow: Dataflow) -> None:
        super().__init__()
        self._flow = flow

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in _OUT_OF_SIGHT:
            self._flow.steering |= self._flow.of(tensors(args))
        return function(*args, **kwargs or {})


def tensors(values: object) -> list[torch.Tensor]:
    """The tensors among these, in any form."""
    return [one for one in tree_leaves(values) if isinstance(one, torch.Tensor)]


def _memory(tensor: torch.Tensor) -> int:
    """Address of what holds the tensor's memory, equal for all views of it and within vmap."""
    while Dataflow.is_wrapped(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor.untyped_storage()._cdata
