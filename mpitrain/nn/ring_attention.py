"""Exact attention over positions that lie on several ranks; no rank holds all scores.

Ring attention (Liu et al. 2023): each rank keeps its queries; keys and values go round the ring,
and the next ones arrive while a rank attends to those that are here.  The softmax over all keys is
gathered from some of them at a time, by the largest score m so far and the sum t of exponentials::

    o <- o exp(m - new) + exp(S - new) V,    t <- t exp(m - new) + sum exp(S - new)

In the end ``o / t`` is the output.  Backward, ``P = exp(S - m - log t)`` is computed again.  The
gradients by keys and values go round with these, from the first other rank on, until they are at
home.

Shapes: N samples, H heads, T positions of a rank, E numbers of a head; 2 keys and values.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives import Communicator, give_way
from mpitrain.arrays import Array, array_namespace
from mpitrain.nn.layer import widened
from mpitrain.nn.positions import Positions, Tile

#: Factors 0 and ``1 / (1 - p)`` on the attention of some heads in a tile; None: no dropout.
Drop = Callable[[slice, Tile], Array]


@dataclass(frozen=True)
class BlockAttention:
    """Attention of some queries to some keys.

    ``heads`` says which of the layer's heads the arrays hold, for ``drop``.
    """

    scale: float
    causal: bool
    heads: slice
    drop: Drop | None = None

    def add(
        self, q: Array, o: Array, most: Array, total: Array, kv: Array, tiles: Sequence[Tile]
    ) -> None:
        """Add the attention of scaled q_NHTE to kv_2NHTE; o_NHTE, most_NHT and total_NHT are those
        of the formula."""
        xp, (keys, values) = array_namespace(q), widened(kv)
        for tile in tiles:
            rows = tile.rows
            scores = _scores(q, keys, tile)
            before = most[:, :, rows]
            now = xp.maximum(before, scores.max(axis=-1))
            scores -= now[..., None]
            weights = xp.exp(scores, out=scores)
            less = xp.exp(before - now)
            most[:, :, rows] = now
            total[:, :, rows] *= less
            total[:, :, rows] += weights.sum(axis=-1)
            if self.drop:
                weights *= xp.asarray(self.drop(self.heads, tile), dtype=weights.dtype)
            o[:, :, rows] *= less[..., None]
            o[:, :, rows] += weights @ values[:, :, tile.columns]

    def back(
        self, q: Array, lse: Array, dy: Array, dots: Array, kv: Array, dq: Array, dkv: Array,
        tiles: Sequence[Tile],
    ) -> None:  # fmt: skip
        """Add to the gradients by scaled q_NHTE and by kv_2NHTE.

        ``dots`` are the sums over E of dy times o.
        """
        xp, (keys, values) = array_namespace(dy), widened(kv)
        for tile in tiles:
            rows, columns = tile.rows, tile.columns
            scores = _scores(q, keys, tile)
            scores -= lse[:, :, rows, None]
            weights = xp.exp(scores, out=scores)
            above = dy[:, :, rows]
            dweights = above @ values[:, :, columns].swapaxes(-1, -2)
            kept = weights
            if self.drop:
                factors = xp.asarray(self.drop(self.heads, tile), dtype=weights.dtype)
                dweights *= factors
                kept = weights * factors
            dkv[1, :, :, columns] += kept.swapaxes(-1, -2) @ above
            dweights -= dots[:, :, rows, None]
            dweights *= weights
            dq[:, :, rows] += dweights @ keys[:, :, columns]
            dkv[0, :, :, columns] += dweights.swapaxes(-1, -2) @ q[:, :, rows]


def _scores(q: Array, keys: Array, tile: Tile) -> Array:
    """Scores of a tile, of scaled queries; later keys have -inf."""
    xp = array_namespace(q)
    scores = q[:, :, tile.rows] @ keys[:, :, tile.columns].swapaxes(-1, -2)
    if tile.later is not None:
        later = xp.triu(xp.ones(scores.shape[-2:], bool), tile.later)
        xp.copyto(scores, -xp.inf, where=later)
    return scores


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
    xp, kv = array_namespace(qkv), qkv[1:]
    q = widened(qkv[0]) * blocks.scale
    o, total = xp.zeros_like(q), xp.zeros(q.shape[:-1], q.dtype)
    most = xp.full(total.shape, -xp.inf, q.dtype)
    for owner, there in rounds(kv, positions):
        blocks.add(q, o, most, total, there, positions.tiles(owner, blocks.causal))
    o /= total[..., None]
    return o, Attended(blocks, positions, qkv[0], kv, o, most + xp.log(total))


def attend_back(saved: Attended, dy: Array) -> Array:
    """Gradient by qkv_3NHTE for dy_NHTE, in the wide type; collective."""
    positions, xp = saved.positions, array_namespace(dy)
    blocks, group = saved.blocks, positions.group
    q = widened(saved.q) * blocks.scale
    dots = (dy * saved.o).sum(axis=-1)
    dqkv = xp.zeros((3, *dy.shape), dy.dtype)
    coming: _Passing | None = None
    for owner, kv in rounds(saved.kv, positions):
        is_own = owner == group.rank
        dkv = dqkv[1:] if is_own else xp.zeros(kv.shape, dy.dtype)
        tiles = positions.tiles(owner, blocks.causal)
        blocks.back(q, saved.lse, dy, dots, kv, dqkv[0], dkv, tiles)
        if coming:
            dkv += coming.wait()
        if group.comm is not None and not is_own:
            before = _shape(dkv, positions, (owner - 1) % group.size)
            coming = _Passing(group.comm, dkv, xp.empty(before, dkv.dtype), tag=1)
    dqkv[0] *= blocks.scale
    if coming:
        dqkv[1:] += coming.wait()
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
