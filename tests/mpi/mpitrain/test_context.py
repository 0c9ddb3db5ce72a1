"""Attention over positions that lie on several ranks, against one rank that has them all."""

import numpy as np
import pytest

from mpitrain import nn
from mpitrain.group import TensorGroup
from mpitrain.nn import ring_attention
from mpitrain.nn.context import Context
from mpitrain.nn.positions import Positions
from tests.mpi.mpitrain.layouts import RANKS

pytestmark = pytest.mark.mpi(min_size=2)


def cut(comm, length, way, tile=3, **more):
    positions = Positions(TensorGroup(comm), length, way, tile)
    return Context(positions=positions, training=True, samples=np.arange(2), **more)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("kind", [nn.CausalAttention, nn.Attention])
@pytest.mark.parametrize("way", ["zigzag", "ring", "ulysses"])
def test_attention_is_that_of_one_rank(comm, way, kind, dropout):
    """With pieces of unequal lengths, and heads that the ranks cannot share equally."""
    expect_one_rank_s(kind(2, dropout), cut(comm, 4 * RANKS + 3, way))


def expect_one_rank_s(layer, context, heads=1):
    """Outputs and gradients of the own positions are those of a rank that has all."""
    own, rng = context.positions.own, np.random.default_rng(0)
    length = context.positions.length
    x, dy = (rng.normal(size=(2, length, n * heads)) for n in (18, 6))
    whole, saved = layer.forward({}, x, Context(training=True, samples=np.arange(2)))
    slope, _ = layer.backward({}, saved, dy)
    y, saved = layer.forward({}, x[:, own], context)
    np.testing.assert_allclose(y, whole[:, own], rtol=1e-12, atol=1e-13)
    dx, _ = layer.backward({}, saved, dy[:, own])
    np.testing.assert_allclose(dx, slope[:, own], rtol=1e-11, atol=1e-12)


def counting(monkeypatch):
    """The shapes of all scores, and the bytes of all messages, as they come."""
    shapes, messages = [], []
    scores, passing = ring_attention._scores, ring_attention._Passing

    def counted(*arguments):
        found = scores(*arguments)
        shapes.append(found.shape)
        return found

    def sent(comm, own, found, tag):
        messages.append(own.nbytes)
        return passing(comm, own, found, tag)

    monkeypatch.setattr(ring_attention, "_scores", counted)
    monkeypatch.setattr(ring_attention, "_Passing", sent)
    return shapes, messages


def test_scores_and_messages_are_those_of_the_paper(comm, monkeypatch):
    """Half of a block of scores with each other rank, in one piece, and one's own block whole."""
    length = 8 * RANKS
    shapes, messages = counting(monkeypatch)
    layer, context = nn.CausalAttention(2), cut(comm, length, "zigzag", tile=512)
    y, saved = layer.forward({}, np.zeros((2, length // RANKS, 12)), context)
    earlier = [(2, 2, 8, 4)] * comm.rank
    assert shapes == [(2, 2, 8, 8), *earlier, *[(2, 2, 4, 8)] * (RANKS - 1 - comm.rank)]
    passed = 2 * 2 * 2 * (length // RANKS) * 2 * 8  # keys and values, samples, heads, ..., bytes
    assert messages == [passed] * (RANKS - 1)
    layer.backward({}, saved, y)
    assert shapes[: len(shapes) // 2] == shapes[len(shapes) // 2 :]
    assert messages == [passed] * 3 * (RANKS - 1)  # backward, gradients go the same way


def test_all_positions_of_some_heads_go_by_one_kernel(comm, monkeypatch):
    """As on one rank, no scores are computed again; equal parts go by calls of equal blocks."""
    shapes, _ = counting(monkeypatch)
    monkeypatch.setattr(type(comm), "Alltoallv", None)
    expect_one_rank_s(nn.CausalAttention(2), cut(comm, 4 * RANKS, "ulysses", tile=512), RANKS)
    assert not shapes
