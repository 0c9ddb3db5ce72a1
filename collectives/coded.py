"""All-reduces of codes: fewer bytes than the numbers have, and not quite the numbers.

Codes do not add up; what they decode to does.  Each rank sends every other
one the code of its shard; the owner of a shard decodes and adds what came in rank order, encodes
the sum again and sends it to all.  A contribution is rounded twice, on any number of ranks (a ring
that coded every hop would round it p - 1 times), and all ranks decode the same bytes, so that the
result is bitwise the same on all of them.

Two-phase is the exchange of 1-bit Adam (Tang et al. 2021), of ZeRO++ (Wang et al. 2023) and of
bfloat16 sums that do not lose their small terms.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from mpi4py import MPI

from collectives.codec import Array, Bytes, Codec, Dice, Residual, shards, slices
from collectives.communicator import AnyPlan, Communicator
from collectives.errors import InvalidBuffer
from collectives.phased import Part, Phased

#: Decoded numbers are added in this type, in which sums of float32 hardly round at all.
_WIDE = np.float64


@dataclass(frozen=True)
class Coding:
    """A codec, and what a rank remembers beside it.

    Attributes:
        codec: the codec, equal on all ranks.
        residual: memory of what this rank's codes left out, of shape (n,) for n elements.
        owner_residual: memory of what the codes of sums left out, for the rank's own shard.
        dice: random numbers for codecs that use them.
        place: tells the dice of this sum from others', at least 0.
    """

    codec: Codec
    residual: Residual | None = None
    owner_residual: Residual | None = None
    dice: Dice = field(default_factory=Dice)
    place: int = 0


class TwoPhase(Phased):
    """The sum of vectors by codes: an all-to-all of codes, a wide sum, an all-gather of its code.

    Cost, with codes of c(n) bytes: 2 (p-1) c(ceil(n/p)) bytes sent by a rank, in the rounds of the
    two collectives; p + 1 passes of decoding over the own shard.

    With ``counts`` it is a reduce-scatter: the first half alone, in which nothing is rounded twice.

    Attributes:
        sent: bytes that this rank sends in a run.
    """

    def __init__(
        self,
        comm: Communicator,
        coding: Coding,
        own: Array,
        total: Array,
        counts: Sequence[int] | None = None,
        *,
        lasts: bool = True,
    ) -> None:
        """Binds it; collective.

        Args:
            own: shape (n,), what this rank adds; float32 or float64.  Only the residual changes it,
                and the sum if it has the same memory.
            total: shape (n,), where the sum goes; ``own`` itself, or other memory.  With
                ``counts``, shape (counts[rank],).
            counts: elements of each rank's shard.
            lasts: puts codes where a node's ranks reach one another's memory, which is worth it
                for a sum that is run again and again.

        Raises:
            InvalidBuffer: shapes or types do not fit.
        """
        codec = coding.codec
        rank, size = comm.rank, comm.size
        self.algorithm = f"two-phase of {codec}"
        self.collective = "allreduce" if counts is None else "reduce_scatter"
        lengths = shards(own.size, size) if counts is None else list(counts)
        _expect_fitting(own, total, lengths, None if counts is None else lengths[rank])
        self._parts = slices(lengths)
        self._coding, self._codec, self._own, self._total = coding, codec, own, total
        self._residual, self._owner_residual = coding.residual, coding.owner_residual
        self._rank, self._is_whole = rank, counts is None
        block = codec.nbytes(max(lengths))
        self._lengths = lengths
        allocate = comm.empty if lasts else np.zeros
        self._outgoing = allocate((size, block), np.uint8)
        self._incoming = allocate((size, block), np.uint8)
        self._results = allocate((size if self._is_whole else 0, block), np.uint8)
        self._sum = np.empty(lengths[rank], _WIDE)
        self._decoded = np.empty(max(lengths), own.dtype)
        self.sent = (2 if self._is_whole else 1) * (size - 1) * block
        plans: list[AnyPlan] = []
        if size > 1:
            plans = [comm.Alltoall_init(self._outgoing, self._incoming, algorithm="pairwise")]
            if self._is_whole:
                gather = comm.Allgather_init(MPI.IN_PLACE, self._results, algorithm="ring")
                plans.append(gather)
        super().__init__(comm, plans)

    def phases(self) -> Iterator[Part]:
        own, codec = self._own, self._codec
        if self._residual:
            self._residual.add_to(own)
        for peer, part in enumerate(self._parts):
            code = self._code(self._outgoing, peer)
            codec.encode(own[part], code, partial(self._draw, peer))
            if self._residual:
                self._residual.keep(own[part], self._read(code, peer), part)
        if len(self._parts) > 1:
            yield self._plans[0]
        else:
            self._incoming[...] = self._outgoing
        self._sum[...] = 0
        for peer in range(len(self._parts)):
            self._sum += self._read(self._code(self._incoming, peer, self._rank), self._rank)
        if not self._is_whole:
            self._total[...] = self._sum
            return
        if self._owner_residual:
            self._owner_residual.add_to(self._sum)
        code = self._code(self._results, self._rank)
        codec.encode(self._sum, code, partial(self._draw, len(self._parts)))
        if self._owner_residual:
            self._owner_residual.keep(self._sum, self._read(code, self._rank))
        if len(self._parts) > 1:
            yield self._plans[1]
        for peer, part in enumerate(self._parts):
            self._total[part] = self._read(self._code(self._results, peer), peer)

    def _code(self, codes: Bytes, row: int, shard: int | None = None) -> Bytes:
        """The code in a row, for the shard of that rank or of another."""
        return codes[row, : self._codec.nbytes(self._lengths[row if shard is None else shard])]

    def _read(self, code: Bytes, shard: int) -> Array:
        decoded = self._decoded[: self._lengths[shard]]
        self._codec.decode(code, decoded)
        return decoded

    def _draw(self, part: int) -> np.random.Generator:
        return self._coding.dice.draw(self._coding.place, part)


def _expect_fitting(own: Array, total: Array, lengths: list[int], shard: int | None) -> None:
    wanted = own.size if shard is None else shard
    if own.dtype not in (np.dtype(np.float32), np.dtype(np.float64)) or own.ndim != 1:
        raise InvalidBuffer(
            f"a coded sum takes float32 or float64 of one dimension, not {own.dtype} of "
            f"{own.ndim}; convert it"
        )
    if total.shape != (wanted,) or total.dtype != own.dtype or sum(lengths) != own.size:
        raise InvalidBuffer(
            f"a coded sum of {own.size} elements of {own.dtype} goes into {wanted} of that type, "
            f"not into {total.shape} of {total.dtype}"
        )
