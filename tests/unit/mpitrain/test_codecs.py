"""Codecs of gradients: their bytes, what they lose, and that nothing is lost without a word."""

import ml_dtypes
import numpy as np
import pytest
from codec_cases import CODES, LENGTHS, ROLLING, dyadic, once, sent_by, through, vectors

from collectives.codec import Residual
from mpitrain.compress import CodecError, parse
from mpitrain.compress.codec import Remembering, Sparse, feedback_of
from mpitrain.compress.packing import pack, pack_trits, packed, packed_trits, unpack, unpack_trits

every_code = pytest.mark.parametrize("codec", CODES.values(), ids=CODES.keys())


@every_code
def test_codes_have_as_many_bytes_as_they_say_and_stand_for_finite_numbers(codec):
    for n in LENGTHS:
        for dtype in (np.float32, np.float64):
            for name, x in vectors(n, dtype).items():
                with np.errstate(over="raise", invalid="raise", divide="raise"):
                    decoded = through(codec, x)
                assert np.isfinite(decoded).all(), name
                if "zero" in name and codec.name != "signum":
                    np.testing.assert_array_equal(decoded, 0)


@pytest.mark.parametrize(
    ("text", "n", "nbytes"),
    [
        ("bf16", 1001, 2002),
        ("fp16", 1001, 2002),
        ("int8", 1001, 1001 + 4 * 4),
        ("int8:block=0", 1001, 1001 + 4),
        ("sign", 1001, 126 + 4),
        ("onebit:block=500", 1001, 126 + 8 * 3),
        ("signum", 1001, 126),
        ("terngrad", 1001, 201 + 4),
        ("qsgd:levels=15", 1001, 626 + 8),  # 5 bits
        ("qsgd:levels=16,block=0", 1001, 751 + 4),  # 6 bits
        ("threshold", 1001, 251),
        ("atomo:rank=3", 1001, 4 * 3 * (32 + 32)),
        ("atomo:rank=32", 1001, 4 * 1001),
    ],
)
def test_bytes_are_those_of_the_closed_form(text, n, nbytes):
    assert parse(text).nbytes(n) == nbytes
    assert parse(text).nbytes(0) == 0


@every_code
def test_a_code_depends_on_its_dice_alone(codec):
    x = np.random.default_rng(1).normal(size=500).astype(np.float32)
    first, *others = (through(codec, x, seed) for seed in (4, 5, 6))
    rolls = any((other != first).any() for other in others)
    assert rolls == any(word in str(codec) for word in ROLLING)


def bound(codec, x):
    """The most that the code of ``x`` may be away from it, element by element."""
    x = np.abs(x.astype(np.float64))
    if codec.name in ("bf16", "fp16"):
        is_brain = codec.name == "bf16"
        lowest, digits, most = (2.0**-133, 8, 3.3895e38) if is_brain else (2.0**-24, 11, 65504)
        return np.maximum(np.maximum(x * 2.0**-digits, lowest / 2), x - most)
    block = codec.block or max(1, len(x))
    parts = [x[i : i + block] for i in range(0, len(x), block)]
    most = np.concatenate([np.full(len(part), part.max()) for part in parts] or [x])
    return most / 127 * (1 if codec.unbiased else 0.5) * (1 + 1e-5) + 127 * 2.0**-149


@pytest.mark.parametrize("text", [t for t in CODES if t[:4] in ("bf16", "fp16", "int8")])
def test_each_number_is_as_near_as_promised(text):
    codec = CODES[text]
    for n in (1, 9, 257, 1000):
        for name, x in vectors(n).items():
            assert (np.abs(through(codec, x).astype(np.float64) - x) <= bound(codec, x)).all(), name


@pytest.mark.parametrize("text", ["int8", "terngrad", "qsgd:norm=max"])
def test_scales_in_float32_cover_the_largest_number(text):
    """One that is above its scale would be sent as less than it is, whatever the dice."""
    for n in range(1, 33):
        x = np.random.default_rng(n).normal(size=n)
        largest = np.abs(x).argmax()
        sent = through(parse(text), x, seed=n)[largest] / x[largest]
        assert 1 - 1e-15 < sent < 1 + 2.0**-22


@pytest.mark.parametrize("text", ["sign", "sign:block=64", "onebit", "onebit:block=16"])
def test_codes_of_signs_leave_less_than_there_was(text):
    codec = parse(text)
    rng = np.random.default_rng(2)
    drawn = [x for n in (1, 9, 257, 1000) for x in vectors(n, np.float64).values()]
    drawn += [rng.standard_t(1 + rng.integers(4), 1 + rng.integers(300)) for _ in range(200)]
    for x in drawn:
        if not np.abs(x).max() > 1e-40:
            continue  # below float32's scales
        x = x / np.abs(x).max()
        left, given = (np.square(y).sum() for y in (x - through(codec, x), x))
        if text == "sign":
            share = np.abs(x).sum() ** 2 / (len(x) * given)
            assert left == pytest.approx(given * (1 - share), rel=1e-5, abs=1e-6)
        assert left <= given * (1 + 1e-6)


def test_bfloat16_is_that_of_ml_dtypes():
    x = np.random.default_rng(0).integers(0, 1 << 32, 200_000, np.uint32).view(np.float32)
    x = np.concatenate([x[np.isfinite(x)], vectors(1000)["denormal"]])
    x = x[np.abs(x) < 3.38e38]
    np.testing.assert_array_equal(
        through(parse("bf16"), x), x.astype(ml_dtypes.bfloat16).astype(np.float32)
    )


def variance(codec, x):
    """Variance of each number over the dice, in closed form."""
    block = codec.block or len(x)
    found = []
    for part in (np.abs(x[i : i + block]).astype(np.float64) for i in range(0, len(x), block)):
        if codec.name == "terngrad":
            found.append(part * (part.max() - part))
            continue
        if codec.name == "qsgd":
            norm = part.max() if codec.norm == "max" else np.sqrt(np.square(part).sum())
            step = norm / codec.levels
        else:
            step = part.max() / 127
        place = np.mod(part / step, 1)
        found.append(step**2 * place * (1 - place))
    return np.concatenate(found)


UNBIASED = (
    "int8:block=64,rounding=stochastic", "terngrad", "terngrad:block=64", "qsgd",
    "qsgd:levels=1,block=0,norm=max", "qsgd:block=32,levels=100",
)  # fmt: skip


@pytest.mark.parametrize("text", UNBIASED)
def test_the_mean_over_the_dice_is_the_vector(text):
    codec, draws = parse(text), 800
    assert codec.unbiased
    x = np.random.default_rng(3).normal(size=150).astype(np.float32)
    x[:5] = [0, 0, 3, -3, 1e-6]
    drawn = np.array([once(codec, x, seed) for seed in range(draws)], np.float64)
    sigma = np.sqrt(variance(codec, x))
    assert (np.abs(drawn.mean(0) - x) <= 5 * sigma / np.sqrt(draws) + 1e-6 * np.abs(x) + 1e-9).all()
    assert np.square(drawn - x).sum(1).mean() == pytest.approx(sigma @ sigma, rel=0.1)
    assert (drawn[:, 0] == 0).all()
    if hasattr(codec, "omega"):
        assert sigma @ sigma <= codec.omega(len(x)) * (x @ x)


def test_a_damped_code_leaves_less_than_there_was_on_average():
    x = np.random.default_rng(4).normal(size=400)
    damped, free = parse("qsgd:levels=1,block=0,damped=true"), parse("qsgd:levels=1,block=0")
    left = [
        [np.square(x - once(code, x, seed)).sum() for seed in range(100)] for code in (damped, free)
    ]
    omega = free.omega(400)
    assert np.mean(left[0]) < x @ x * (1 - 1 / (1 + omega)) * 1.02 < x @ x < np.mean(left[1])


# fmt: off
EXACT = ("threshold:tau=0.25", "topk:keep=0.05", "topk:keep=1")
NEARLY = ("bf16", "fp16", "int8", "int8:block=0,rounding=stochastic", "sign", "onebit",
          "qsgd:damped=true", "threshold:tau=0.3", "atomo:rank=20")
# fmt: on


@pytest.mark.parametrize("text", EXACT + NEARLY)
def test_what_was_sent_and_what_is_left_are_what_was_given(text):
    """Over 500 steps; exactly where scales are powers of two, and where values are sent."""
    codec, n = parse(text), 100
    rng = np.random.default_rng(6)
    residual = Residual(np.zeros(n))
    given, sent = np.zeros(n), np.zeros(n)
    rounding = 0.0
    for step in range(500):
        x = dyadic(rng, n)
        given += x
        residual.add_to(x)
        decoded = sent_by(codec, x, step) if isinstance(codec, Sparse) else once(codec, x, step)
        residual.keep(x, decoded)
        residual.commit()
        sent += decoded
        rounding += np.abs(sent).max() + np.abs(x).max()
        if text in EXACT:
            np.testing.assert_array_equal(sent + residual.value, given)
    np.testing.assert_allclose(sent + residual.value, given, atol=rounding * 2.0**-53)
    assert np.abs(residual.value).max() < 500
    assert text != "topk:keep=1" or not residual.value.any()


@pytest.mark.parametrize("text", ["sign", "terngrad", "int8"])
def test_what_is_left_out_of_the_largest_numbers_stays_finite(text):
    codec, rng = parse(text), np.random.default_rng(0)
    memory = Residual(np.zeros(256, np.float32))
    for step in range(6):
        x = (rng.choice([-1.0, 1.0], 256) * rng.uniform(1e37, 3.39e38, 256)).astype(np.float32)
        memory.add_to(x)
        sent = once(codec, x, step)
        memory.keep(x, sent)
        memory.commit()
        for values in (x, sent, *memory.arrays.values()):
            assert np.isfinite(values).all()


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_signum_is_the_majority_of_signs_and_plus_where_there_is_none(size):
    codec, ranks = parse("signum"), [dyadic(np.random.default_rng(r), 101) for r in range(size)]
    expected = np.where(sum(np.where(x >= 0, 1, -1) for x in ranks) >= 0, 1, -1)
    votes = np.sum([through(codec, x) for x in ranks], axis=0)
    np.testing.assert_array_equal(through(codec, votes), expected)


def test_signum_sends_the_sign_of_its_own_momentum():
    codec = parse("signum:momentum=0.75")
    assert isinstance(codec, Remembering) and feedback_of(codec) == "never"
    memory, mean = codec.memory(np.zeros(3)), np.zeros(3)
    for step, g in enumerate([[4.0, -8, 1], [0, 16, 1], [-16, 0, 1], [9, 9, 9]]):
        x = 1.0 * np.array(g)
        memory.add_to(x)
        if step == 3:
            memory.rollback()
        memory.commit()
        if step < 3:
            mean = 0.75 * mean + 0.25 * np.array(g)
            np.testing.assert_array_equal(x, mean)
        np.testing.assert_array_equal(memory.arrays["m"], mean)


@pytest.mark.parametrize("n", LENGTHS)
def test_small_integers_are_packed_and_read_again(n):
    rng = np.random.default_rng(n)
    for bits in (1, 2, 3, 5, 8, 11, 16):
        values = rng.integers(0, 1 << bits, n)
        code = np.full(packed(n, bits), 0xFF, np.uint8)
        pack(values, bits, code)
        np.testing.assert_array_equal(unpack(code, n, bits), values)
    trits = rng.integers(0, 3, n)
    code = np.full(packed_trits(n), 0xFF, np.uint8)
    pack_trits(trits, code)
    np.testing.assert_array_equal(unpack_trits(code, n), trits)
    assert code.max(initial=0) < 243


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("int9", "there is no codec 'int9'"),
        ("int8:blocks=4", "which has block, rounding"),
        ("int8:block=4,block=5", "block is there twice"),
        ("int8:block=-1", "must be at least 1 element"),
        ("int8:rounding=up", "rounding"),
        ("qsgd:levels=0", "from 1 to 32767"),
        ("qsgd:levels=3.5", "int"),
        ("threshold:tau=0", "above 0"),
        ("threshold:tau=nan", "above 0"),
        ("terngrad:clip=-1", "at least 0"),
        ("signum:momentum=1", "below 1"),
        ("topk:keep=0", "a share"),
        ("topk:keep=2", "a share"),
        ("int8+int8", "there is no codec 'int8[+]int8'"),
        ("atomo:rank=0", "at least 1"),
    ],
)
def test_options_that_cannot_be_are_refused_in_a_sentence(text, sentence):
    with pytest.raises(CodecError, match=sentence):
        parse(text)
