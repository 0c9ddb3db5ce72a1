"""Protocols of codecs for gradients; the kind of a codec decides the collective.

| kind                 | what adds up | collective                          | examples   |
| -------------------- | ------------ | ----------------------------------- | ---------- |
| :class:`Codec`       | decoded ones | two-phase                           | int8, sign |
| :class:`LinearCodec` | the codes    | all-reduces of the codes, by phases | PowerSGD   |
| :class:`Sparse`      | supports     | the sparse all-reduce               | top-k      |

A codec knows no ranks and no MPI.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

from collectives.codec import Codec, Residual
from mpitrain.arrays import Array

#: Whether the error of a codec is added to the next numbers: "on": yes; "off": it may be; "never":
#: that would do harm.
Feedback = Literal["on", "off", "never"]


class Sketch(ABC):
    """Encoder of some tensors, bound to them, in phases of sums over ranks.

    Attributes:
        sums: arrays of shape (k,), each to be summed over the ranks, in this order.
        state: arrays by name, kept from step to step, the same on all ranks; changes take effect
            with :meth:`commit`.
    """

    sums: Sequence[Array]

    @property
    def state(self) -> Mapping[str, Array]:
        return {}

    @abstractmethod
    def phases(self, step: int) -> Iterator[None]:
        """Encode and decode: before each yield one array of :attr:`sums` is filled, after it the
        array holds the sum over ranks; at the end the tensors hold the decoded sum."""

    @abstractmethod
    def sent(self, tensors: Mapping[str, Array]) -> None:
        """Writes this rank's part of the decoded sum; after :meth:`phases`."""

    def commit(self) -> None:  # noqa: B027
        """Keeps the changes of this step."""

    def rollback(self) -> None:  # noqa: B027
        """Drops the changes of this step."""


def type_of(tensors: Mapping[str, Array]) -> "np.dtype[Any]":
    """Type that holds the numbers of all tensors."""
    return np.result_type(*tensors.values()) if tensors else np.dtype(np.float32)


@runtime_checkable
class LinearCodec(Protocol):
    """Codec whose codes add up to the code of the sum, on any number of ranks."""

    @property
    def unbiased(self) -> bool: ...

    def sketch(self, tensors: Mapping[str, Array], seed: int) -> Sketch:
        """Binds an encoder to these tensors, whose memory it reads and writes in each step.

        Args:
            tensors: by name, the same names and shapes on all ranks.
            seed: the run's seed; random choices depend on it, on names and on the step, never on
                the rank.
        """

    def nbytes(self, shapes: Sequence[tuple[int, ...]], itemsize: int = 4) -> int:
        """Bytes of all sums of tensors of these shapes."""


@runtime_checkable
class Sparse(Protocol):
    """Codec that sends some elements with their indices."""

    @property
    def unbiased(self) -> bool: ...

    def select(self, x: Array, step: int) -> "np.ndarray[tuple[int], np.dtype[np.uint32]]":
        """The elements of ``x``, of shape (n,), whose finite numbers are sent; rising."""


@runtime_checkable
class Remembering(Protocol):
    """Codec with a memory of its own in place of a residual.

    If the memory is a momentum, it must also follow the gradients that travel uncompressed, as
    that of :class:`~mpitrain.compress.dgc.DGC` does.
    """

    def memory(self, value: Array) -> Residual:
        """Makes the memory of a vector; ``value``: zeros of its shape and type, to be used."""


def feedback_of(
    codec: Codec | LinearCodec | Sparse, asked: Literal["auto", "on", "off"] = "auto"
) -> Feedback:
    """Feedback of a codec, or what is asked for; by default ``"on"`` if it is biased."""
    found: Feedback = getattr(codec, "feedback", "off" if codec.unbiased else "on")
    return found if asked == "auto" else asked
