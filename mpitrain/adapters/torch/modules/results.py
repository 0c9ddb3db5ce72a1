"""Results of modules for any number of samples, from those of two trial runs."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import TreeSpec, tree_unflatten

#: Samples of the two runs, from which shapes for any number of samples follow.
FEW, MANY = 2, 3


class Shape(NamedTuple):
    """The shape of a tensor for any number of samples, from those for few and many."""

    few: Sequence[int]
    many: Sequence[int]
    kind: torch.dtype

    @property
    def has_rows(self) -> bool:
        """Whether the first axis has a row for each sample, or one for all of them."""
        return (*self.few[:1], *self.many[:1]) in ((FEW, MANY), (1, 1))

    def absent(
        self, samples: int, lengths: Mapping[int, int], device: torch.device
    ) -> torch.Tensor:
        """:func:`absent` for so many samples, of other lengths than those in the trial."""
        both = zip(self.few, self.many, strict=True)
        sizes = [
            few + (many - few) * (samples - FEW) // (MANY - FEW)
            if few != many
            else lengths.get(many, many)
            for few, many in both
        ]
        return absent(sizes, self.kind, device)


class Result:
    """The result of a module in any form; for any number of samples, tensors are :class:`Shape`."""

    def __init__(self, leaves: Sequence[Any], structure: TreeSpec) -> None:
        self.leaves, self.structure = leaves, structure

    def __deepcopy__(self, memo: dict[int, Any]) -> "Result":
        return self

    def of(
        self,
        samples: int,
        tensors: Mapping[int, torch.Tensor],
        lengths: Mapping[int, int],
        device: torch.device,
    ) -> Any:
        """The result with these tensors in their places, and without numbers in others.

        Padding gives samples other lengths than in the trial; ``lengths`` has them by those there.
        """
        leaves = [
            one.absent(samples, lengths, device) if isinstance(one, Shape) else one
            for one in self.leaves
        ]
        for place, tensor in tensors.items():
            leaves[place] = tensor
        return tree_unflatten(leaves, self.structure)

    def in_any_size(self, few: "Result") -> "Result | None":
        """This result for any number of samples, from that of few; None: it has another form."""
        if len(few.leaves) != len(self.leaves):
            return None
        leaves: list[Any] = []
        for one, other in zip(few.leaves, self.leaves, strict=True):
            both = isinstance(one, torch.Tensor), isinstance(other, torch.Tensor)
            if both == (True, True) and one.dim() == other.dim():
                leaves.append(Shape(one.shape, other.shape, other.dtype))
            elif any(both):
                return None
            else:  # an object that may change, as a cache, would keep what this run has put in
                leaves.append(other if isinstance(other, (bool, int, float, str)) else None)
        return Result(leaves, self.structure)


def tensors(values: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors among these."""
    return [one for one in values if isinstance(one, torch.Tensor)]


def absent(
    shape: Sequence[int], kind: torch.dtype, device: torch.device | None = None
) -> torch.Tensor:
    """A tensor from which no result follows: of NaN if possible, in the memory of one number."""
    value = torch.nan if kind.is_floating_point or kind.is_complex else 0
    return torch.full((), value, dtype=kind, device=device).expand(*shape)
