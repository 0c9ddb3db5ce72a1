"""Codes that add up: the code of a sum is the sum of codes, on any number of ranks."""

import numpy as np
import pytest
from codec_cases import dyadic, linear_sum

from mpitrain.compress import parse
from mpitrain.compress.powersgd import orthonormal

SHAPES = {"w": (12, 20), "conv": (8, 3, 3, 3), "b": (20,), "odd": (1, 7), "x": (), "none": (0, 4)}
LINEAR = (
    "blocks:keep=0.2,block=16",
    "blocks:keep=1,block=1000",
    "powersgd",
    "powersgd:rank=20,min_rate=0",
    "powersgd:warm=false",
)


def drawn(size, seed=0, shapes=SHAPES):
    """Tensors of several ranks."""
    rng = np.random.default_rng(seed)
    return [{name: dyadic(rng, int(np.prod(shape))).reshape(shape)
             for name, shape in shapes.items()} for _ in range(size)]  # fmt: skip


def zeros(shapes):
    return {name: np.zeros(shape) for name, shape in shapes.items()}


@pytest.mark.parametrize("text", [t for t in LINEAR if not t.startswith("blocks:keep=0")])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_the_sum_of_codes_is_the_code_of_the_sum(text, size):
    """Not of blocks: ranks choose by sums of sizes, one alone by sizes of sums."""
    code = parse(text)
    ranks, alone = drawn(size), drawn(1)
    sketches = [code.sketch(tensors, 3) for tensors in ranks]
    one = [code.sketch(alone[0], 3)]
    for step in range(3):
        for own, new in zip(ranks, drawn(size, step), strict=True):
            for name in SHAPES:
                own[name][...] = new[name]
        for name in SHAPES:
            alone[0][name][...] = sum(own[name] for own in ranks)
        linear_sum(sketches, step, ranks)
        linear_sum(one, step, alone)
        for name in SHAPES:
            np.testing.assert_allclose(ranks[0][name], alone[0][name], atol=1e-9)


@pytest.mark.parametrize("text", LINEAR)
def test_what_was_sent_and_what_is_left_are_what_was_given(text):
    """Over 500 steps; exactly for codes that send values as they are."""
    code, shapes = parse(text), {"w": (6, 10), "b": (5,)}
    tensors, left = ([zeros(shapes) for _ in range(2)] for _ in range(2))
    sketches = [code.sketch(own, 3) for own in tensors]
    given, total = zeros(shapes), zeros(shapes)
    rng = np.random.default_rng(0)
    for step in range(500):
        for r, own in enumerate(tensors):
            for name, tensor in own.items():
                tensor[...] = dyadic(rng, tensor.size).reshape(tensor.shape)
                given[name] += tensor
                tensor += left[r][name]
                left[r][name][...] = tensor
        sent = linear_sum(sketches, step, tensors)
        for name in shapes:
            for kept, own in zip(left, sent, strict=True):
                kept[name] -= own[name]
            total[name] += tensors[0][name]
    for name in shapes:
        found = total[name] + sum(own[name] for own in left)
        if text.startswith("powersgd"):
            np.testing.assert_allclose(found, given[name], atol=1e-9)
        else:
            np.testing.assert_array_equal(found, given[name])


# coarse blocks


def test_the_blocks_that_are_largest_over_all_ranks_are_sent():
    ranks = drawn(3, shapes={"w": (10, 10), "b": (30,)})
    expected = {name: sum(t[name] for t in ranks) for name in ranks[0]}
    scores = {}
    for name, size in {"w": 100, "b": 30}.items():
        for start in range(0, size, 16):
            part = [t[name].reshape(-1)[start : start + 16] for t in ranks]
            scores[name, start] = sum(np.abs(x).sum() for x in part)
    kept = sorted(scores, key=scores.get)[-4:]
    code = parse("blocks:keep=0.4444,block=16")
    assert code.nbytes([(10, 10), (30,)], 4) == 4 * (9 + 4 * 16)
    linear_sum([code.sketch(tensors, 0) for tensors in ranks], 0, ranks)
    for name, start in scores:
        block = slice(start, start + 16)
        found = ranks[0][name].reshape(-1)[block]
        wanted = expected[name].reshape(-1)[block] * ((name, start) in kept)
        np.testing.assert_array_equal(found, wanted)


# PowerSGD


def test_a_basis_is_orthonormal_and_spans_the_columns():
    rng = np.random.default_rng(0)
    thin, tiny = rng.normal(size=(30, 5)), 1e-200 * rng.normal(size=(9, 9))
    for matrix in (thin, tiny, np.vander(np.linspace(0, 1, 30), 9)):
        basis, near = orthonormal(matrix), 1e-12 * abs(matrix).max()
        np.testing.assert_allclose(basis.T @ basis, np.eye(matrix.shape[1]), atol=1e-12)
        np.testing.assert_allclose(basis @ (basis.T @ matrix), matrix, atol=near)


def test_a_sum_of_low_rank_is_exact():
    rng = np.random.default_rng(0)
    mean = rng.normal(size=(40, 2)) @ rng.normal(size=(2, 30))
    noise = rng.normal(size=(40, 30))
    ranks = [{"w": mean / 2 + noise}, {"w": mean / 2 - noise}]
    code = parse("powersgd:rank=2")
    linear_sum([code.sketch(tensors, 0) for tensors in ranks], 0, ranks)
    np.testing.assert_allclose(ranks[0]["w"], mean, atol=1e-12)
    assert code.nbytes([(40, 30)]) == 4 * 2 * 70


def test_a_warm_start_finds_the_best_approximation_of_a_steady_gradient():
    rng = np.random.default_rng(0)
    left, right = orthonormal(rng.normal(size=(30, 30))), orthonormal(rng.normal(size=(20, 20)))
    m = left[:, :20] * 0.7 ** np.arange(20) @ right.T
    best = np.sqrt(np.sum((0.7 ** np.arange(2, 20)) ** 2))
    error = {}
    for warm in ("true", "false"):
        tensors = {"w": m.copy()}
        sketch = parse(f"powersgd:rank=2,warm={warm},min_rate=1").sketch(tensors, 0)
        for step in range(30):
            tensors["w"][...] = m
            linear_sum([sketch], step, [tensors])
        error[warm] = np.linalg.norm(tensors["w"] - m)
    assert error["true"] == pytest.approx(best, rel=1e-6) and error["false"] > 1.02 * best


def test_matrices_that_save_too_little_are_summed_as_they_are():
    code = parse("powersgd:rank=4")
    assert code.factors((64, 3, 3, 3)) == (64, 27, 4)
    assert code.factors((16, 16)) is None  # 128 of 256: by 2, and not by more
    assert code.factors((17, 17)) == (17, 17, 4)
    assert code.factors((1000,)) is None and code.factors(()) is None
    ranks = drawn(3, shapes={"w": (16, 16)})
    expected = sum(t["w"] for t in ranks)
    sketches = [code.sketch(tensors, 0) for tensors in ranks]
    assert len(sketches[0].sums) == 1
    linear_sum(sketches, 0, ranks)
    np.testing.assert_array_equal(ranks[0]["w"], expected)


def test_a_step_that_is_skipped_leaves_q_as_it_was():
    [tensors] = drawn(1)
    sketch = parse("powersgd").sketch(tensors, 0)
    before = {name: q.copy() for name, q in sketch.state.items()}
    assert before.keys() == {"w.q", "conv.q"}
    for _ in sketch.phases(0):
        pass
    sketch.rollback()
    sketch.commit()
    for name, q in sketch.state.items():
        np.testing.assert_array_equal(q, before[name])
    for _ in sketch.phases(0):
        pass
    sketch.commit()
    assert any((q != before[name]).any() for name, q in sketch.state.items())
