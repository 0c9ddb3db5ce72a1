"""What a code of gradients must say of itself; the kind decides the collective.

| kind            | what adds up | collective                             | examples       |
| --------------- | ------------ | -------------------------------------- | -------------- |
| :class:`Codec`  | decoded ones | two-phase, or gathered                 | int8, sign     |
| :class:`Linear` | the codes    | all-reduces of the code, phase by phase | PowerSGD       |
| :class:`Sparse` | supports     | the sparse all-reduce                  | top-k          |

A code knows no ranks and no MPI.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, Protocol, runtime_checkable

import numpy as np

from collectives.codec import Codec, Memory
from mpitrain.arrays import Array

__all__ = [
    "Codec",
    "Feedback",
    "Linear",
    "Memory",
    "Momentum",
    "Remembering",
    "Sketch",
    "Sparse",
    "feedback_of",
]

#: "on": what a code leaves out is added to the next numbers; "off": it may be, and need not be;
#: "never": it would do harm.
Feedback = Literal["on", "off", "never"]


class Sketch(Protocol):
    """The code of some tensors, bound to them, in phases of sums over ranks.

    Attributes:
        sums: arrays of shape (k,), each to be summed over the ranks, in this order.
        state: arrays by name that are kept from step to step, the same on all ranks; what a step
            changes of them takes effect with :meth:`commit`.
    """

    @property
    def sums(self) -> Sequence[Array]: ...

    @property
    def state(self) -> Mapping[str, Array]: ...

    def phases(self, step: int) -> Iterator[None]:
        """Encode and decode: before each yield one array of :attr:`sums` is filled, after it the
        array holds the sum over ranks; at the end the tensors hold the decoded sum."""

    def sent(self, tensors: Mapping[str, Array]) -> None:
        """Write what of this rank's own values the sum has; after :meth:`phases`."""

    def commit(self) -> None:
        """The step counts."""

    def rollback(self) -> None:
        """The step does not count."""


@runtime_checkable
class Linear(Protocol):
    """A code whose sum is the code of the sum, on any number of ranks.

    Attributes:
        unbiased: see :class:`~collectives.coded.Codec`.
    """

    @property
    def unbiased(self) -> bool: ...

    def sketch(self, tensors: Mapping[str, Array], seed: int) -> Sketch:
        """The code of these tensors, whose memory it reads and writes in each run.

        Args:
            tensors: by name, the same names and shapes on all ranks.
            seed: of the run; what is drawn depends on it, on names and on the step, never on the
                rank.
        """

    def nbytes(self, shapes: Sequence[tuple[int, ...]], itemsize: int = 4) -> int:
        """Bytes of all sums of tensors of these shapes."""


@runtime_checkable
class Sparse(Protocol):
    """A choice of elements, which travel with their values as they are.

    Attributes:
        unbiased: see :class:`~collectives.coded.Codec`.
    """

    @property
    def unbiased(self) -> bool: ...

    def select(self, x: Array, step: int) -> "np.ndarray[tuple[int], np.dtype[np.uint32]]":
        """The chosen elements of ``x``, of shape (n,), whose numbers are finite; rising."""

    def values(self, chosen: Array) -> Array:
        """What is sent for the chosen numbers: most codes send them as they are."""


@runtime_checkable
class Remembering(Protocol):
    """A code with a memory of its own, in the place of a residual.

    A momentum's must be of all gradients, also of those that travel as they are: see
    :class:`Momentum`.
    """

    def memory(self, value: Array) -> Memory:
        """The memory of a vector; ``value``: zeros of its shape and type, which may be used."""


@runtime_checkable
class Momentum(Protocol):
    """A code whose memory is a momentum, in the place of the optimiser's.

    Attributes:
        clip: bound of the length of the summed gradient; 0 for none.
    """

    @property
    def clip(self) -> float: ...

    def share(self, squares: float, ranks: int) -> float:
        """What a rank's gradient is multiplied by, of this squared length, one of so many."""

    def of_sum(self, value: Array) -> Memory:
        """The memory of a sum that has travelled as it is; ``value``: as for :meth:`memory`."""


def feedback_of(code: Codec | Linear | Sparse) -> Feedback:
    """What a code says of feedback; if nothing, what is biased has it."""
    found: Feedback = getattr(code, "feedback", "off" if code.unbiased else "on")
    return found
