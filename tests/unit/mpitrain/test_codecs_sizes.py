"""The encoded sizes of published tables, to the printed digit."""

import pytest
from codec_sizes import (
    dense_bytes,
    dgc_bytes,
    powersgd_bytes,
    sent_dense,
    sent_gathered,
    sign_bytes,
)

from mpitrain.compress import parse

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


def resnet50():
    shapes = [(64, 3, 7, 7), (64,), (64,)]
    before = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            for out, inside, size in ((width, before, 1), (width, width, 3), (4 * width, width, 1)):
                shapes += [(out, inside, size, size), (out,), (out,)]
            if block == 0:
                shapes += [(4 * width, before, 1, 1), (4 * width,), (4 * width,)]
            before = 4 * width
    return [*shapes, (1000, 2048), (1000,)]


def alexnet():
    """The first, whose second, fourth and fifth convolutions are in two groups."""
    layers = [(96, 3, 11, 11), (256, 48, 5, 5), (384, 256, 3, 3), (384, 192, 3, 3)]
    layers += [(256, 192, 3, 3), (4096, 9216), (4096, 4096), (1000, 4096)]
    return [shape for layer in layers for shape in (layer, layer[:1])]


def lstm(words, width, layers):
    """A language model whose input and output words are tied."""
    shapes = [(words, width)]
    for _ in range(layers):
        shapes += [(4 * width, width), (4 * width, width), (4 * width,), (4 * width,)]
    return [*shapes, (words,)]


def test_powersgds_table_of_cifar():
    """Vogels et al. 2019, table of ResNet18: MB an epoch of 24 steps."""
    shapes, steps = resnet18(), 24
    assert dense_bytes(shapes) == 4 * 11_173_962
    assert round(steps * dense_bytes(shapes) / MB) == 1023
    assert round(steps * sign_bytes(shapes) / MB) == 32
    sizes = [round(steps * powersgd_bytes(shapes, rank) / MB, 2) for rank in (1, 2, 4)]
    assert sizes == [4.21, 7.53, 14.18] and round(sizes[1]) == 8 and round(sizes[2]) == 14


def test_powersgds_table_of_a_language_model():
    """LSTM on WikiText-2: 70 steps an epoch."""
    shapes, steps = lstm(28_869, 650, 3), 70
    assert dense_bytes(shapes) == 4 * 28_949_319
    assert round(steps * dense_bytes(shapes) / MB) == 7730
    assert round(steps * sign_bytes(shapes) / MB) == 242
    assert round(steps * powersgd_bytes(shapes, 4) / MB) == 64


@pytest.mark.parametrize(
    ("shapes", "dense", "sent", "ratio"),
    [
        (alexnet(), 232.56, 0.39, 597),
        (resnet50(), 97.49, 0.35, 277),
        (lstm(10_000, 1500, 2), 194.68, 0.42, 462),
    ],
    ids=["AlexNet", "ResNet-50", "LSTM"],
)
def test_the_table_of_deep_gradient_compression(shapes, dense, sent, ratio):
    """Lin et al. 2018: MB a step, at 0.1%."""
    code = dgc_bytes(shapes, 0.001)
    assert round(dense_bytes(shapes) / MB, 2) == dense
    assert round(code / MB, 2) == sent
    assert abs(dense_bytes(shapes) / code - ratio) < 1


def test_the_code_has_the_bytes_of_the_formula():
    shapes = resnet18()
    assert parse("powersgd:rank=2,min_rate=0").nbytes(shapes) == powersgd_bytes(shapes, 2)
    assert parse("signum").nbytes(11_173_962) == -(-11_173_962 // 8)


def test_what_is_sent_is_not_what_is_encoded():
    """ResNet18 on 16 ranks, MB sent by one rank an epoch."""
    shapes = resnet18()
    dense = 24 * sent_dense(dense_bytes(shapes), 16) / MB
    gathered = 24 * sent_gathered(sign_bytes(shapes), 16) / MB
    two_phase = 24 * sent_dense(sign_bytes(shapes), 16) / MB
    low_rank = 24 * sent_dense(powersgd_bytes(shapes, 2), 16) / MB
    assert [round(x) for x in (dense, gathered, two_phase)] == [1918, 480, 60]
    assert round(low_rank, 1) == 14.1
