"""Exact attention over positions that lie on several ranks; no rank holds all scores.

Ring attention (Liu et al. 2023): each rank keeps its queries; keys and values go round the ring,
and the next ones arrive while a rank attends to those that are here.  The softmax over all keys is
merged from softmaxes over some of them by their log-sum-exp::

    o <- o exp(lse - new) + o_b exp(lse_b - new),    new = log(exp(lse) + exp(lse_b))

Backward, ``P = exp(S - lse)`` is computed again, and the gradients by keys and values go round with
them until they are at home.  Ulysses (Jacobs et al. 2023) exchanges positions for heads instead:
each rank attends to all positions with some of the heads.

Shapes: N samples, H heads, T positions of a rank, E numbers of a head; 2 keys and values.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives import Communicator
from collectives.execution.waiting import give_way
from mpitrain.arrays import Array, array_namespace
from mpitrain.group import share
from mpitrain.nn.layer import widened
from mpitrain.nn.positions import Positions, Tile

#: Tiles of queries with tiles of keys.
Pairs = Iterator[tuple[Tile, Tile]]
#: Factors 0 and ``1 / (1 - p)`` on the attention of some heads' queries to keys; None: no dropout.
Drop = Callable[[slice, Tile, Tile], Array]


@dataclass(frozen=True)
class BlockAttention:
    """Attention of some queries to some keys.

    ``heads`` says which of the layer's heads the arrays hold, for ``drop``.
    """

    scale: float
    causal: bool
    heads: slice
    drop: Drop | None = None

    def add(self, q: Array, o: Array, lse: Array, kv: Array, pairs: Pairs) -> None:
        """Merge the attention of q_NHTE to kv_2NHTE into o_NHTE and lse_NHT."""
        xp = array_namespace(q)
        for row, column in pairs:
            scores = self._scores(q, kv, row, column)
            most = scores.max(axis=-1, keepdims=True)
            scores -= most
            weights = xp.exp(scores, out=scores)
            total = weights.sum(axis=-1, keepdims=True)
            own = (most + xp.log(total))[..., 0]
            if self.drop:
                weights *= xp.asarray(self.drop(self.heads, row, column), dtype=weights.dtype)
            block = weights @ widened(kv[1, :, :, column.here])
            block /= total
            before = lse[:, :, row.here]
            merged = xp.logaddexp(before, own)
            block *= xp.exp(own - merged)[..., None]
            o[:, :, row.here] *= xp.exp(before - merged)[..., None]
            o[:, :, row.here] += block
            lse[:, :, row.here] = merged

    def back(
        self, mine: "Attended", dy: Array, dots: Array, kv: Array, dq: Array, dkv: Array,
        pairs: Pairs,
    ) -> None:  # fmt: skip
        """Add to the gradients by queries and by kv_2NHTE; ``dots``: sums over E of dy times o."""
        xp = array_namespace(dy)
        for row, column in pairs:
            scores = self._scores(mine.q, kv, row, column)
            scores -= mine.lse[:, :, row.here, None]
            weights = xp.exp(scores, out=scores)
            above = dy[:, :, row.here]
            dweights = above @ widened(kv[1, :, :, column.here]).swapaxes(-1, -2)
            kept = weights
            if self.drop:
                factors = xp.asarray(self.drop(self.heads, row, column), dtype=weights.dtype)
                dweights *= factors
                kept = weights * factors
            dkv[1, :, :, column.here] += kept.swapaxes(-1, -2) @ above
            dweights -= dots[:, :, row.here, None]
            dweights *= weights
            dweights *= self.scale
            dq[:, :, row.here] += dweights @ widened(kv[0, :, :, column.here])
            dkv[0, :, :, column.here] += dweights.swapaxes(-1, -2) @ widened(mine.q[:, :, row.here])

    def _scores(self, q: Array, kv: Array, row: Tile, column: Tile) -> Array:
        """Scaled scores of a tile of queries with one of keys; later keys have -inf."""
        xp = array_namespace(q)
        keys = widened(kv[0, :, :, column.here])
        scores = widened(q[:, :, row.here]) @ keys.swapaxes(-1, -2)
        scores *= self.scale
        if self.causal and row.start == column.start:
            later = xp.triu(xp.ones(scores.shape[-2:], bool), 1)
            xp.copyto(scores, -xp.inf, where=later)
        return scores

    def pairs(self, positions: Positions, rank: int, owner: int) -> Pairs:
        """The tiles of a rank's queries and an owner's keys that attend to each other.

        Without ``causal`` they are all.  Else keys must not be later, and tiles are equal or apart:
        zigzag's queries see all keys in the first piece of an earlier rank; the second half of the
        queries sees both pieces of a later one.  Both are half of the scores.
        """
        for row in positions.tiles(rank):
            for column in positions.tiles(owner):
                if not self.causal or column.start <= row.start:
                    yield row, column


@dataclass(frozen=True)
class Attended:
    """Values saved for the backward pass: T times E numbers a head and sample, never T times T."""

    blocks: BlockAttention
    positions: Positions
    q: Array
    kv: Array
    o: Array
    lse: Array


def attend(blocks: BlockAttention, qkv: Array, positions: Positions) -> tuple[Array, Attended]:
    """Attention of the queries of qkv_3NHTE; returns y_NHTE in the wide type; collective."""
    count = qkv.shape[2]
    if positions.way == "ulysses" and positions.are_split:
        own = _heads(count, positions)[positions.group.rank]
        first = blocks.heads.start
        blocks = replace(blocks, heads=slice(first + own.start, first + own.stop))
        y, saved = attend(blocks, _to_heads(qkv, positions), positions.whole)
        return _to_positions(y[None], positions, count)[0], replace(saved, positions=positions)
    xp, q, kv = array_namespace(qkv), qkv[0], qkv[1:]
    o = xp.zeros(q.shape, widened(q[:0]).dtype)
    lse = xp.full(q.shape[:-1], -xp.inf, o.dtype)
    for owner, keys in rounds(kv, positions):
        blocks.add(q, o, lse, keys, blocks.pairs(positions, positions.group.rank, owner))
    return o, Attended(blocks, positions, q, kv, o, lse)


def attend_back(saved: Attended, dy: Array) -> Array:
    """Gradient by qkv_3NHTE for dy_NHTE, in the wide type; collective."""
    positions, xp = saved.positions, array_namespace(dy)
    if positions.way == "ulysses" and positions.are_split:
        there = _to_heads(dy[None], positions)[0]
        dqkv = attend_back(replace(saved, positions=positions.whole), there)
        return _to_positions(dqkv, positions, dy.shape[1])
    blocks, group = saved.blocks, positions.group
    dots = (dy * saved.o).sum(axis=-1)
    dqkv = xp.zeros((3, *dy.shape), dy.dtype)
    coming: _Passing | None = None
    for owner, kv in rounds(saved.kv, positions):
        dkv = xp.zeros(kv.shape, dy.dtype)
        pairs = blocks.pairs(positions, group.rank, owner)
        blocks.back(saved, dy, dots, kv, dqkv[0], dkv, pairs)
        if coming:
            dkv += coming.wait()
        if group.comm is not None:
            before = _shape(dkv, positions, (owner - 1) % group.size)
            coming = _Passing(group.comm, dkv, xp.empty(before, dkv.dtype), tag=1)
    dqkv[1:] = coming.wait() if coming else dkv
    return dqkv


def rounds(kv: Array, positions: Positions) -> Iterator[tuple[int, Array]]:
    """Keys and values of each rank, own first, with its number; the next are on their way."""
    group, xp = positions.group, array_namespace(kv)
    for step in range(group.size):
        owner = (group.rank - step) % group.size
        coming = None
        if group.comm is not None and step + 1 < group.size:
            before = _shape(kv, positions, (owner - 1) % group.size)
            coming = _Passing(group.comm, kv, xp.empty(before, kv.dtype), tag=0)
        yield owner, kv
        if coming:
            kv = coming.wait()


def _shape(kv: Array, positions: Positions, owner: int) -> tuple[int, ...]:
    return (*kv.shape[:3], positions.count(owner), kv.shape[4])


class _Passing:
    """A message to the next rank of a ring, and the one from the rank before."""

    def __init__(self, comm: Communicator, own: Array, found: Array, tag: int) -> None:
        """Begin both; ``own`` must not change, and ``found`` is filled."""
        size = comm.size
        self._comm, self._found, self._own = comm, found, np.ascontiguousarray(own)
        self._source = (comm.rank - 1) % size
        out, into = (array.reshape(-1).view(np.uint8) for array in (self._own, found))
        self._sealed, self._coming = comm.envelope(out), comm.envelope(into)
        message: Any = [out, MPI.BYTE]
        if self._sealed:
            self._sealed.seal()
            message = self._sealed.message
        buffer: Any = self._coming.message if self._coming else [into, MPI.BYTE]
        self._requests = [
            comm.Isend(message, (comm.rank + 1) % size, tag),
            comm.Irecv(buffer, self._source, tag),
        ]

    def wait(self) -> Array:
        """The array that has arrived.

        Raises:
            CorruptMessage: it arrived changed, where messages carry checksums.
        """
        what = f"keys and values from context rank {self._source}"
        with self._comm.waiting(what, by_all=False):
            while not MPI.Request.Testall(self._requests):
                give_way()
            if self._coming:
                self._coming.check(self._comm, self._source)
        for envelope in (self._sealed, self._coming):
            if envelope:
                envelope.free()
        return self._found


def _heads(count: int, positions: Positions) -> list[slice]:
    """The heads of each rank while it has all positions."""
    size = positions.group.size
    return [share(count, rank, size) for rank in range(size)]


def _to_heads(x: Array, positions: Positions) -> Array:
    """From own positions of all heads to all positions of own heads: axes (k, N, H, T, E)."""
    heads, xp = _heads(x.shape[2], positions), array_namespace(x)
    own = heads[positions.group.rank]
    shapes = [
        (*x.shape[:2], own.stop - own.start, positions.count(rank), x.shape[4])
        for rank in range(positions.group.size)
    ]
    found = positions.group.exchange([x[:, :, part] for part in heads], shapes)
    return xp.concatenate(found, axis=3)


def _to_positions(x: Array, positions: Positions, count: int) -> Array:
    """The way back; ``count``: number of all heads."""
    ranks, xp = range(positions.group.size), array_namespace(x)
    pieces = [positions.pieces(rank)[0] for rank in ranks]
    own = positions.count(positions.group.rank)
    shapes = [
        (*x.shape[:2], part.stop - part.start, own, x.shape[4]) for part in _heads(count, positions)
    ]
    found = positions.group.exchange([x[:, :, :, piece] for piece in pieces], shapes)
    return xp.concatenate(found, axis=2)
