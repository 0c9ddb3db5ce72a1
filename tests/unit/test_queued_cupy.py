"""The stand-in for CuPy: it refuses what CuPy refuses, and has no name that CuPy lacks."""

import inspect
import re

import numpy as np
import pytest

from tests import queued_cupy
from tests.queued_cupy.counts import counts
from tests.queued_cupy.signatures import (
    ATTRIBUTES,
    BY_HAND,
    FUNCTIONS,
    METHODS,
    SHARED,
    UFUNCS,
    parameters,
)


@pytest.fixture
def xp(monkeypatch):
    return queued_cupy.install(monkeypatch)


def test_arrays_of_the_host_are_refused(xp):
    x, host = xp.zeros(4, np.float32), np.zeros(4, np.float32)
    for mixed in (
        lambda: x + host,
        lambda: host + x,
        lambda: x @ host,
        lambda: xp.maximum(x, host),
        lambda: xp.where(x > 0, x, host),
        lambda: xp.concatenate([x, host]),
        lambda: xp.copyto(x, host),
        lambda: np.concatenate([x, host]),
        lambda: xp.exp(host),
        lambda: np.asarray(x),
    ):
        with pytest.raises(TypeError):
            mixed()
    with pytest.raises(ValueError, match="cannot be used for fill"):
        x[:] = host
    with pytest.raises(TypeError, match="unexpected keyword argument 'initial'"):
        x.max(initial=0.0)
    with pytest.raises(AttributeError):
        xp.add_at  # noqa: B018


def test_results_lie_on_the_device(xp):
    x = xp.arange(6, dtype=np.float32).reshape(2, 3)
    for found in (x.sum(), x[0, 0], x.max(axis=1), np.sqrt(x), np.stack([x, x]), 2 * x, x @ x.T):
        assert type(found) is xp.ndarray
    assert type(x.get()) is np.ndarray
    y = x
    y += 1
    assert y is x
    assert x.get().tolist() == [[1, 2, 3], [4, 5, 6]]
    x[0] = x[1]
    x[1] = 7
    assert x.tolist() == [[4, 5, 6], [7, 7, 7]]
    assert (xp.empty(3, np.uint8).get() == 0xA5).all()


def test_kernels_and_waits_are_counted(xp):
    x = xp.zeros((4, 4), np.float32)
    counts.reset()
    x = x + 1
    y = x.reshape(-1)[2:5]
    x @ x
    x[None] @ x
    assert counts.kernels == {"add": 1, "matmul": 4}
    assert counts.broadcast_matmuls.total() == 1
    assert counts.waited == 0
    assert float(y.sum()) == 3
    y[y > 0] = 2
    assert {why for why, _ in counts.syncs} == {"float()", "boolean mask write"}
    assert counts.waited == 2
    import cupyx

    with cupyx.allow_synchronize(False), pytest.raises(RuntimeError, match="float"):
        float(y[0])


def test_a_kernel_runs_its_twin(xp):
    @queued_cupy.twin("doubled")
    def doubled(x, n):
        x[:n] *= 2

    kernel = xp.RawKernel('extern "C" __global__ void doubled(float* x, long long n) {}', "doubled")
    x = xp.ones(3, np.float32)
    counts.reset()
    kernel((1,), (128,), (x, 2))
    assert counts.kernels == {"doubled": 1}
    assert x.tolist() == [2, 2, 1]
    with pytest.raises(TypeError, match="Unsupported type"):
        kernel((1,), (128,), (np.ones(3), 2))
    with pytest.raises(RuntimeError, match="INVALID_VALUE"):
        kernel((0,), (128,), (x, 2))


@pytest.fixture
def cupy():
    """The real one, which imports without a GPU."""
    return pytest.importorskip("cupy", reason="compares with CuPy: pip install cupy-cuda12x")


def _known(function):
    """The parameters of one of CuPy's functions, by signature or by the first line of its text."""
    try:
        found = inspect.signature(function).parameters
        return [name for name in found if name != "self"]
    except (TypeError, ValueError):
        line = (function.__doc__ or "").partition("\n")[0]
    inner = re.search(r"\((.*)\)", re.sub(r" ?->.*", "", line))
    if inner is None:
        return None
    text = re.sub(r"\[[^\]]*\]|\([^)]*\)", "", inner[1])
    names = [part.partition("=")[0].strip().split(" ")[-1].lstrip("*") for part in text.split(",")]
    return [name for name in names if name not in ("", "self", "/")]


def test_functions_and_methods_take_what_cupys_take(cupy):
    unknown, wrong = [], {}
    for where, texts in ((cupy, FUNCTIONS), (cupy.ndarray, METHODS | BY_HAND)):
        for name, text in texts.items():
            known = _known(getattr(where, name))
            if known is None:
                unknown.append(name)
                continue
            by_position, by_keyword = parameters(text)
            if by_position != known[: len(by_position)] or not set(by_keyword) <= set(known):
                wrong[name] = known
    assert not wrong
    assert len(unknown) < 5, unknown


def test_other_names_are_cupys(cupy):
    for name in UFUNCS:
        assert isinstance(getattr(cupy, name), cupy.ufunc), name
    for name in ATTRIBUTES:
        assert hasattr(cupy.ndarray, name), name
    for name in SHARED:
        assert hasattr(cupy, name), name
    import cupyx

    for name in ("scatter_add", "allow_synchronize"):
        assert hasattr(cupyx, name), name
    for name in ("RawKernel", "RawModule"):
        assert hasattr(cupy, name), name
