"""The kernels for a GPU: they compile, and their C++, run on the CPU, has the twins' values."""

import ctypes
import shutil
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from mpitrain.kernels import HOST, Kernels
from mpitrain.kernels.cuda import KINDS, CudaKernels, options, source
from mpitrain.kernels.host import AdamOptions, SGDOptions
from tests import emulated_cuda
from tests.cases import slow_case

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
    scope="module", params=["float32", *(slow_case(n) for n in ("float64", "bfloat16"))]
)
def case(request, folder):
    """The type, and the kernels in both orders of a block's threads."""
    both = [
        OnTheHost(emulated_cuda.Emulated(source(), KINDS[request.param], folder, backwards))
        for backwards in (False, True)
    ]
    return SimpleNamespace(name=request.param, kind=TYPES[request.param], both=both)


def drawn(kind, *shape):
    return np.random.default_rng(np.random.SeedSequence(shape)).normal(size=shape).astype(kind)


def operations(kind):
    """Names of operations, and arguments of all sizes."""
    draw = partial(drawn, kind)
    like_scales = np.float32 if kind == ml_dtypes.bfloat16 else kind
    x, dy = draw(3, 50), draw(50, 3).reshape(3, 50)
    yield "gelu", x
    yield "gelu_gradient", x, HOST.gelu(x.astype(float))[1].astype(kind), dy
    for shape in ((1, 1), (5, 7), (2, 3, 100)):
        x, dy = draw(*shape), draw(*shape[::-1]).reshape(shape)
        weight, bias = draw(shape[-1]), draw(shape[-1] + 1)[1:].copy()
        normal, scale = HOST.normalise(x.astype(float), 1e-2)
        normal, scale = normal.astype(kind), scale.astype(like_scales)
        yield "layer_norm", x, weight, bias, 1e-2
        yield "normalise", x, 1e-2
        yield "layer_norm_gradient", dy, weight, normal, scale
        yield "normalise_gradient", dy, normal, scale
        yield "norm_gradients", dy, normal
    for positions in (1, 5, 70):
        scores, gradient = (draw(n, 2, positions, positions)[-1] for n in (1, 2))
        attention = HOST.causal_softmax(scores.astype(float), 0.5).astype(kind)
        yield "causal_softmax", scores, 0.5
        yield "causal_softmax_gradient", gradient, attention, 0.5
    if kind != ml_dtypes.bfloat16:  # losses are computed in float32
        for smoothing in (0.0, 0.1):
            yield "softmax_loss", draw(5, 130), np.array([0, 129, 3, 3, 64]), 2.0, smoothing
    yield "scatter_add", np.array([[3, 0, 39], [3, -1, 17]]), draw(2, 3, 5), 40
    p, g, mean, square = (draw(3000, n + 1)[:, 0].copy() for n in range(4))
    for flag in (False, True):
        adam, sgd = AdamOptions(0.9, 0.99, 1e-3, 0.1, flag), SGDOptions(0.9, 0.1, flag)
        for scale in (0.5, 1.0):
            yield "adam", p, g, mean, np.abs(square), adam, 7, 0.125, scale
        forgets = AdamOptions(0.0, 0.0, 1e-3, 0.1, flag)
        yield "adam", p, g, mean, np.abs(square), forgets, 7, 0.125, 0.5
        yield "adam_direction", p, g, mean, np.abs(square), adam, 7
        yield "sgd", p[:100].copy(), g[:100].copy(), mean[:100].copy(), sgd, 0.125, 0.5
    yield "square_sum", [draw(n) for n in (1, 300, 0, 70000)]


def results(kernels, name, arguments):
    """All that an operation returns, or else changes."""
    found = getattr(kernels, name)(*arguments)
    if found is None:
        found = [a for a in arguments if isinstance(a, np.ndarray) and a.dtype.kind != "i"]
    return [np.asarray(one) for one in (found if isinstance(found, (tuple, list)) else [found])]


def copied(arguments, cast):
    def copy(one):
        if isinstance(one, list):
            return [*map(copy, one)]
        return cast(one) if isinstance(one, np.ndarray) and one.dtype.kind != "i" else one

    return copy([*arguments])


def test_operations_are_their_twins(case):
    """Close to the twin's results in float64, and bit by bit alike in both orders of threads."""
    seen = set()
    for name, *arguments in operations(case.kind):
        expected = results(HOST, name, copied(arguments, lambda a: a.astype(float)))
        given = [copied(arguments, np.copy) for _ in case.both]
        first, second = (results(k, name, own) for k, own in zip(case.both, given, strict=True))
        near = 1e-13 if name == "square_sum" else NEAR[case.name]  # added up in float64
        for found, again, right in zip(first, second, expected, strict=True):
            assert found.tobytes() == again.tobytes(), name
            error = np.abs(found.astype(float) - right).max(initial=0)
            assert error <= near * max(1.0, np.abs(right).max(initial=0)), (name, error)
        seen.add(name)
    assert seen | {"matmul", "softmax_loss"} == {n for n in vars(Kernels) if n[0] != "_"}


def test_what_is_not_a_number_shows(case):
    rows = np.array([[0.0, np.nan], [1.0, 2.0]], case.kind)
    for kernels in (HOST, *case.both):
        loss, gradient = kernels.softmax_loss(rows.copy(), np.array([0, 1]), 1.0, 0.0)
        assert np.isnan(float(loss))
        assert np.isnan(gradient[0].astype(float)).all()
        assert not np.isnan(gradient[1].astype(float)).any()
        assert np.isnan(float(kernels.square_sum([np.array([1, np.inf * 0], case.kind)])))


def test_many_rows_come_in_their_order(case):
    rows, ones = np.arange(1800) % 3, np.ones((1800, 2), case.kind)
    values = drawn(case.kind, 1800, 2)
    for kernels in (HOST, *case.both):
        table = kernels.scatter_add(rows, values, 3)
        assert table.tobytes() == HOST.scatter_add(rows, values, 3).tobytes()
        assert (kernels.scatter_add(rows, ones, 3) == 600).all()  # 16 bits are not added in 16


def test_arrays_without_elements_launch_nothing(case):
    empty = np.empty((0, 4), case.kind)
    for kernels in case.both:
        kernels.gelu(empty)
        kernels.layer_norm(empty, empty[:0], empty[:0], 1e-5)
        kernels.sgd(*[empty.reshape(-1)] * 3, SGDOptions(0.9, 0.0, False), 0.1, 1.0)


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


def test_large_numbers_are_squared_without_a_warning(recwarn):
    assert HOST.square_sum([np.full(3, 1e20, np.float32)]) == pytest.approx(3e40)
    assert not recwarn.list
