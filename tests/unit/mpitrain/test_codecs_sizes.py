"""The encoded sizes of published tables, to the printed digit: MB an epoch."""

from math import prod

import pytest

from mpitrain.compress import parse
from mpitrain.config import Compress
from mpitrain.parallel.sent_bytes import coded_bytes, dense_bytes
from mpitrain.training.build import compression

MB = 2**20


def resnet18():
    """For CIFAR-10: convolutions, batch norms, one linear layer."""
    shapes = [(64, 3, 3, 3), (64,), (64,)]
    before = 64
    for width in (64, 128, 256, 512):
        for block in range(2):
            for inside in (before, width):
                shapes += [(width, inside, 3, 3), (width,), (width,)]
            if width != before and block == 0:
                shapes += [(width, before, 1, 1), (width,), (width,)]
            before = width
    return [*shapes, (10, 512), (10,)]


def lstm(words, width, layers):
    """A language model whose input and output words are tied."""
    shapes = [(words, width)]
    for _ in range(layers):
        shapes += [(4 * width, width), (4 * width, width), (4 * width,), (4 * width,)]
    return [*shapes, (words,)]


@pytest.mark.parametrize(
    ("shapes", "steps", "numbers", "dense", "signs", "by_rank"),
    [
        (resnet18(), 24, 11_173_962, 1023, 32, {1: 4.21, 2: 7.53, 4: 14.18}),
        (lstm(28_869, 650, 3), 70, 28_949_319, 7730, 242, {4: 64}),
    ],
    ids=["ResNet18 on CIFAR-10", "LSTM on WikiText-2"],
)
def test_sizes_are_those_of_powersgds_tables(shapes, steps, numbers, dense, signs, by_rank):
    """Vogels et al. 2019."""
    assert sum(map(prod, shapes)) == numbers
    assert round(steps * 4 * numbers / MB) == dense
    assert round(steps * parse("signum").nbytes(numbers) / MB) == signs
    for rank, size in by_rank.items():
        code = parse(f"powersgd:rank={rank},min_rate=0")
        assert round(steps * code.nbytes(shapes) / MB, 2 if rank < 4 or size < 20 else 0) == size


def test_what_is_sent_is_not_what_is_encoded():
    """ResNet18 on 16 ranks: MB that one rank sends in an epoch of 24 steps."""
    shapes = resnet18()

    def sent(nbytes):
        return 24 * nbytes / 16 / MB

    assert round(sent(dense_bytes(4 * sum(map(prod, shapes)), 16))) == 1918
    votes = compression(Compress("signum"))
    assert round(sent(coded_bytes(votes, shapes, 16))) == 60
    low_rank = compression(Compress("powersgd:rank=2,min_rate=0", least=1))
    assert round(sent(coded_bytes(low_rank, shapes, 16)), 1) == 14.1
