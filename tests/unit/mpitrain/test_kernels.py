"""The kernels for a GPU: they compile, and their C++, run on the CPU, has the twins' values."""

import ctypes
import shutil
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from mpitrain.kernels import HOST, CudaKernels, kernels_of
from mpitrain.kernels.cuda import KINDS, options, source
from mpitrain.kernels.host import AdamOptions, SGDOptions
from tests import emulated_cuda

#: By type: what is nearly right, relative to the largest number.
NEAR = {"float64": 1e-13, "float32": 3e-6, "bfloat16": 0.02}
TYPES = {"float64": np.float64, "float32": np.float32, "bfloat16": ml_dtypes.bfloat16}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    if not shutil.which("g++"):
        pytest.skip("compiles kernels for the CPU with g++: install it")
    return tmp_path_factory.mktemp("kernels")


class OnTheHost(CudaKernels):
    """The launches of :class:`CudaKernels`, with NumPy's arrays and emulated kernels."""

    def __init__(self, emulated):
        super().__init__(np)
        self._emulated = emulated

    def _launch(self, name, blocks, *arguments, like):
        if blocks:
            self._emulated(name, blocks, *arguments)


@pytest.fixture(
    scope="module",
    params=["float32", *(pytest.param(n, marks=pytest.mark.slow) for n in ("float64", "bfloat16"))],
)
def case(request, folder):
    """The type, and the kernels in both orders of a block's threads."""
    both = [
        OnTheHost(emulated_cuda.Emulated(source(), KINDS[request.param], folder, backwards))
        for backwards in (False, True)
    ]
    return SimpleNamespace(name=request.param, kind=TYPES[request.param], both=both)


def drawn(kind, *shape):
    seed = np.random.SeedSequence(shape)
    return np.random.default_rng(seed).normal(size=shape).astype(kind)


def compare(case, expected, act):
    """``act(kernels)`` gives arrays close to the twin's in float64, the same in both orders."""
    first, second = (act(kernels) for kernels in case.both)
    for found, again, right in zip(first, second, expected, strict=True):
        assert found.tobytes() == again.tobytes()
        right = np.asarray(right, np.float64)
        error = np.abs(found.astype(np.float64) - right).max(initial=0)
        assert error <= NEAR[case.name] * max(1.0, np.abs(right).max(initial=0)), error


def test_gelu(case):
    x, dy = drawn(case.kind, 3, 50), drawn(case.kind, 50, 3).reshape(3, 50)
    wide = x.astype(float)
    y, tanh = HOST.gelu(wide)
    compare(case, (y, tanh), lambda k: k.gelu(x))
    near = tanh.astype(case.kind)
    right = HOST.gelu_gradient(wide, near.astype(float), dy.astype(float))
    compare(case, [right], lambda k: [k.gelu_gradient(x, near, dy)])


@pytest.mark.parametrize("shape", [(1, 1), (5, 7), (2, 3, 100)])
def test_norms(case, shape):
    x, dy = drawn(case.kind, *shape), drawn(case.kind, *shape[::-1]).reshape(shape)
    weight, bias = drawn(case.kind, shape[-1]), drawn(case.kind, shape[-1] + 1)[1:].copy()
    wide = [a.astype(float) for a in (x, weight, bias)]
    compare(case, HOST.layer_norm(*wide, 1e-2), lambda k: k.layer_norm(x, weight, bias, 1e-2))
    compare(case, HOST.normalise(wide[0], 1e-2), lambda k: k.normalise(x, 1e-2))
    normal, scale = case.both[0].normalise(x, 1e-2)
    given = [a.astype(float) for a in (dy, weight, normal, scale)]
    right = HOST.layer_norm_gradient(*given)
    compare(case, [right], lambda k: [k.layer_norm_gradient(dy, weight, normal, scale)])
    right = HOST.normalise_gradient(given[0].copy(), *given[2:])
    compare(case, [right], lambda k: [k.normalise_gradient(dy, normal, scale)])
    right = HOST.norm_gradients(given[0], given[2])
    compare(case, right, lambda k: k.norm_gradients(dy, normal))


@pytest.mark.parametrize("positions", [1, 5, 70])
def test_causal_softmax(case, positions):
    scores, gradient = (drawn(case.kind, n, 2, positions, positions)[-1] for n in (1, 2))
    attention = HOST.causal_softmax(scores.astype(float), 0.5)
    compare(case, [attention], lambda k: [k.causal_softmax(scores.copy(), 0.5)])
    near = attention.astype(case.kind)
    right = HOST.causal_softmax_gradient(gradient.astype(float), near.astype(float), 0.5)
    found = lambda k: [k.causal_softmax_gradient(gradient.copy(), near, 0.5)]  # noqa: E731
    compare(case, [right], found)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_softmax_loss(case, smoothing):
    rows, labels = drawn(case.kind, 5, 130), np.array([0, 129, 3, 3, 64])
    loss, gradient = HOST.softmax_loss(rows.astype(float), labels, 2.0, smoothing)

    def act(kernels):
        found = kernels.softmax_loss(rows, labels, 2.0, smoothing)
        return np.asarray(found[0]), found[1]

    if case.name != "bfloat16":  # whose losses are computed in float32
        compare(case, (loss, gradient), act)


def test_what_is_not_a_number_shows():
    kernels = HOST
    rows = np.array([[0.0, np.nan], [1.0, 2.0]])
    assert np.isnan(kernels.softmax_loss(rows, np.array([0, 1]), 1.0, 0.0)[0])


def test_what_is_not_a_number_shows_in_kernels(case):
    rows = np.array([[0.0, np.nan], [1.0, 2.0]], case.kind)
    for kernels in case.both:
        loss, gradient = kernels.softmax_loss(rows, np.array([0, 1]), 1.0, 0.0)
        assert np.isnan(float(loss))
        assert np.isnan(gradient[0].astype(float)).all()
        assert not np.isnan(gradient[1].astype(float)).any()
        assert np.isnan(float(kernels.square_sum([np.array([1, np.inf * 0], case.kind)])))


def test_scatter_add(case):
    rows = np.array([[3, 0, 39], [3, -1, 17]])
    values = drawn(case.kind, 2, 3, 5)
    right = np.zeros((40, 5))
    HOST.scatter_add(right, rows, values.astype(float))

    def act(kernels):
        table = np.zeros((40, 5), case.kind)
        kernels.scatter_add(table, rows, values)
        return [table]

    compare(case, [right], act)
    assert not right[[1, 2, 4, 38]].any()


def test_many_rows_come_in_their_order(case):
    rows = np.arange(150) % 3
    values = drawn(case.kind, 150, 2)
    right = np.zeros((3, 2), case.kind)
    HOST.scatter_add(right, rows, values)
    for kernels in case.both:
        table = np.zeros((3, 2), case.kind)
        kernels.scatter_add(table, rows, values)
        assert table.tobytes() == right.tobytes()


@pytest.mark.parametrize("decoupled", [False, True])
def test_adam(case, decoupled):
    how, size = AdamOptions(0.9, 0.99, 1e-3, 0.1, decoupled), 3000
    given = [drawn(case.kind, size, n + 1)[:, 0].copy() for n in range(4)]
    given[3] = np.abs(given[3])
    wide = [a.astype(float) for a in given]

    def act(kernels, own):
        own = [a.copy() for a in own]
        kernels.adam(*own, how, 7, 0.125, 0.5)
        kernels.adam(*own, how, 8, 0.125, 1.0)
        return own

    compare(case, act(HOST, wide), lambda k: act(k, given))

    def direction(kernels, own):
        return [kernels.adam_direction(*(a.copy() for a in own), how, 7)]

    compare(case, direction(HOST, wide), lambda k: direction(k, given))


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd(case, nesterov):
    how = SGDOptions(0.9, 0.1, nesterov)
    given = [drawn(case.kind, 100, n + 1)[:, 0].copy() for n in range(3)]

    def act(kernels, own):
        own = [a.copy() for a in own]
        kernels.sgd(*own, how, 0.125, 0.5)
        return own

    wide = [a.astype(float) for a in given]
    compare(case, act(HOST, wide), lambda k: act(k, given))


def test_square_sum(case):
    arrays = [drawn(case.kind, n) for n in (1, 300, 0, 70000)]
    right = sum(float((a.astype(float) ** 2).sum()) for a in arrays)
    for kernels in case.both:
        assert float(kernels.square_sum(arrays)) == pytest.approx(right, rel=1e-13)


def test_arrays_without_elements_launch_nothing(case):
    empty = np.empty((0, 4), case.kind)
    for kernels in case.both:
        kernels.gelu(empty)
        kernels.layer_norm(empty, empty[:0], empty[:0], 1e-5)
        kernels.sgd(*[empty.reshape(-1)] * 3, SGDOptions(0.9, 0.0, False), 0.1, 1.0)


def test_products_of_many_rows_are_one():
    rng = np.random.default_rng(0)
    for samples, positions, inputs, outputs in ((3, 5, 7, 11), (2, 64, 48, 96), (1, 1, 8, 8)):
        x = rng.normal(size=(samples, positions, inputs)).astype(np.float32)
        w = rng.normal(size=(inputs, outputs)).astype(np.float32)
        right = x.astype(float) @ w.astype(float)
        np.testing.assert_allclose(kernels_of(x).matmul(x, w), right, rtol=1e-4, atol=1e-4)
    assert kernels_of(x).matmul(x.astype(np.float16), w.astype(np.float16)).dtype == np.float16


def _nvrtc():
    """NVIDIA's compiler as a library, of its wheel or of the system."""
    spec = find_spec("nvidia")
    for root in (spec and spec.submodule_search_locations) or ():
        for path in sorted(Path(root).glob("*/lib/libnvrtc.so.1[0-9]")):
            return ctypes.CDLL(str(path))
    try:
        return ctypes.CDLL("libnvrtc.so")
    except OSError:
        return None


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("kind", list(KINDS))
def test_kernels_compile_for_gpus(kind, architecture):
    nvrtc = _nvrtc()
    if nvrtc is None:
        pytest.skip("compiles kernels with NVRTC: pip install nvidia-cuda-nvrtc-cu12")
    program = ctypes.c_void_p()
    text = source().encode()
    assert not nvrtc.nvrtcCreateProgram(ctypes.byref(program), text, b"kernels.cu", 0, None, None)
    given = [one.encode() for one in (*options(kind), f"--gpu-architecture={architecture}")]
    status = nvrtc.nvrtcCompileProgram(program, len(given), (ctypes.c_char_p * len(given))(*given))
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    assert status == 0, log.value.decode()
    nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
    assert size.value > 1000
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
