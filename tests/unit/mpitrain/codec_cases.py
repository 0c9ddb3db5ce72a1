"""Common parts of the tests of codecs: codecs, vectors, dice, ranks in one process."""

import numpy as np

from mpitrain.compress import parse

LENGTHS = (0, 1, 2, 3, 7, 8, 9, 255, 256, 257, 1000)
CODED = (
    "bf16", "fp16", "int8", "int8:block=64,rounding=stochastic", "sign", "sign:block=64", "onebit",
    "onebit:block=16", "signum", "terngrad", "terngrad:block=64,clip=2.5", "qsgd",
    "qsgd:levels=1,block=0,norm=max", "qsgd:levels=1000,damped=true", "threshold", "atomo",
    "atomo:rank=3,columns=9",
)  # fmt: skip
#: Words of codecs that roll dice.
ROLLING = ("stochastic", "terngrad", "qsgd", "atomo")


def draw(seed=0):
    """Dice of a message."""
    return lambda: np.random.Generator(np.random.Philox(key=seed))


def once(codec, x, seed):
    """The code of ``x`` by these dice, decoded."""
    code, decoded = np.empty(codec.nbytes(len(x)), np.uint8), np.full_like(x, np.nan)
    codec.encode(x, code, draw(seed))
    codec.decode(code, decoded)
    return decoded


def through(codec, x, seed=0):
    """Code of ``x``, decoded; every byte of it is written, ``x`` is not."""
    kept = x.copy()
    codes = [np.full(codec.nbytes(len(x)), garbage, np.uint8) for garbage in (0xA5, 0x5A)]
    for code in codes:
        codec.encode(x, code, draw(seed))
    np.testing.assert_array_equal(*codes)
    np.testing.assert_array_equal(x, kept)
    return once(codec, x, seed)


def sent_by(code, x, step=0):
    """The vector that the chosen elements are."""
    chosen = code.select(x, step)
    assert chosen.dtype == np.uint32 and (np.diff(chosen.astype(np.int64)) > 0).all()
    found = np.zeros_like(x)
    found[chosen] = x[chosen]
    return found


def vectors(n, dtype=np.float32):
    """Vectors of n numbers by name, some of them awkward."""
    rng, limits = np.random.default_rng(n), np.finfo(dtype)
    found = {
        "normal": rng.normal(size=n),
        "heavy": rng.standard_t(1.5, n),
        "sparse": rng.normal(size=n) * (rng.random(n) < 0.05),
        "one-hot": -3 * (np.arange(n) == n // 2),
        "constant": np.full(n, -0.1),
        "zero": np.zeros(n),
        "minus zero": np.full(n, -0.0),
        "denormal": rng.integers(-9, 9, n) * float(limits.smallest_subnormal),
        "tiny": rng.normal(size=n) * float(limits.tiny),
        "largest": np.where(rng.random(n) < 0.5, 1, -1) * float(limits.max),
        "mixed": rng.normal(size=n) * 10.0 ** rng.integers(-30, 30, n),
    }
    return {name: x.astype(dtype) for name, x in found.items()}


def dyadic(rng, n, dtype=np.float64):
    """Numbers whose sums and halves are exact."""
    return (rng.integers(-64, 65, n) / 64).astype(dtype)


CODES = {text: parse(text) for text in CODED}


def linear_sum(sketches, step, ranks):
    """Exchange of a codec that adds up, in the tensors of several ranks, without ranks.

    Returns:
        The part of each rank's own values that the sum has.
    """
    runs = [sketch.phases(step) for sketch in sketches]
    for number in range(len(sketches[0].sums)):
        for run in runs:
            next(run)
        total = sum(sketch.sums[number] for sketch in sketches)
        for sketch in sketches:
            sketch.sums[number][...] = total
    for run in runs:
        assert next(run, "over") == "over"
    for tensors in ranks[1:]:
        for name, tensor in tensors.items():
            np.testing.assert_array_equal(tensor, ranks[0][name])
    sent = [{name: np.full_like(t, np.nan) for name, t in tensors.items()} for tensors in ranks]
    for sketch, own in zip(sketches, sent, strict=True):
        sketch.sent(own)
        sketch.commit()
    return sent
