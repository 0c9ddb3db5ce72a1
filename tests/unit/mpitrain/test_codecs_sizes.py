"""The encoded sizes of published tables, to the printed digit: MB an epoch."""

from math import prod

import numpy as np
import pytest

from collectives.sparse_vectors import packed
from mpitrain.compress import parse
from mpitrain.compress.options import kept_of
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


def alexnet():
    """In two groups, as the paper and Caffe have it."""
    matrices = [
        (96, 3, 11, 11), (256, 48, 5, 5), (384, 256, 3, 3), (384, 192, 3, 3), (256, 192, 3, 3),
        (4096, 9216), (4096, 4096), (1000, 4096),
    ]  # fmt: skip
    return [shape for matrix in matrices for shape in (matrix, matrix[:1])]


def resnet50():
    shapes, before = [(64, 3, 7, 7)], 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            shapes += [(width, before, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)]
            shapes += [(4 * width, before, 1, 1)] * (block == 0)
            before = 4 * width
    return [*shapes, *[shape[:1] for shape in shapes for _ in range(2)], (1000, 2048), (1000,)]


def deepspeech():
    """deepspeech.pytorch: two convolutions, seven bidirectional GRUs without biases, 29 letters."""
    shapes = [(32, 1, 41, 11), (32, 32, 21, 11), *[(32,)] * 6]
    for inside in (672, *[1200] * 6):
        shapes += [(3600, inside), (3600, 1200)] * 2
    return [*shapes, *[(1200,)] * 14, (29, 1200)]


@pytest.mark.parametrize(
    ("shapes", "numbers", "dense", "size", "ratio"),
    [
        (alexnet(), 60_965_224, 232.56, 0.39, 597.7),
        (resnet50(), 25_557_032, 97.49, 0.35, 276.7),
        (lstm(10_000, 1500, 2), 51_034_000, 194.68, 0.42, 461.8),
        (deepspeech(), 117_461_168, 448.08, 0.74, 608.1),
    ],
    ids=["AlexNet", "ResNet-50", "two tied LSTMs on PTB", "DeepSpeech"],
)
def test_ratios_are_those_of_deep_gradient_compression(shapes, numbers, dense, size, ratio):
    """Lin et al. 2018, whose ratios are these numbers without their digit after the point, or
    rounded: values of 4 bytes and gaps of 2, vectors as they are."""
    assert sum(map(prod, shapes)) == numbers
    assert round(4 * numbers / MB, 2) == dense
    how = compression(Compress("dgc:keep=0.001"))
    coded = sum(prod(shape) for shape in shapes if how.codes(shape))
    pairs = kept_of(coded, how.codec.keep_at(0))
    drawn = np.cumsum(np.random.default_rng(0).geometric(0.001, pairs)).astype(np.uint32) - 1
    sent = packed(drawn).nbytes + 4 * pairs + 4 * (numbers - coded)
    assert (round(sent / MB, 2), round(4 * numbers / sent, 1)) == (size, ratio)


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
    assert round(sent(coded_bytes(compression(Compress("signum")), shapes, 16))) == 60
    low_rank = compression(Compress("powersgd:rank=2,min_rate=0", least=1))
    assert round(sent(coded_bytes(low_rank, shapes, 16)), 1) == 14.1
