"""A strict stand-in for CuPy, for tests without a GPU.

Arrays of a class of their own, which refuse what CuPy refuses: NumPy's arrays beside them, a
conversion that nobody asked for, parameters that CuPy does not have.  Every kernel and every time
that the host waits is counted (:data:`counts`).

Kernels run at once.  Other ways share these arrays: in tests/queued_cupy kernels are queued, and in
tests/gpu/virtual.py they take virtual time and compute nothing.

    xp = strict_cupy.install(monkeypatch)
    counts.reset()
    ...
    assert counts.waited == 0
"""

import sys
from types import ModuleType

import numpy as np

from tests.strict_cupy import cuda, raw
from tests.strict_cupy.counts import counts
from tests.strict_cupy.namespace import BY_HAND, Ufunc, function
from tests.strict_cupy.ndarray import ndarray
from tests.strict_cupy.raw import twin
from tests.strict_cupy.signatures import FUNCTIONS, SHARED, UFUNCS

__all__ = ["counts", "install", "make", "ndarray", "twin"]


def make() -> dict[str, ModuleType]:
    """The modules ``cupy`` and ``cupyx``, to be put into ``sys.modules``."""
    cupy, cupyx = ModuleType("cupy"), ModuleType("cupyx")
    cupy.__version__ = "14.0.0"
    cupy.ndarray = ndarray
    for name in FUNCTIONS:
        setattr(cupy, name, BY_HAND.get(name) or function(name))
    for name in UFUNCS:
        setattr(cupy, name, Ufunc(name))
    cupy.abs = cupy.absolute
    for name in SHARED:
        setattr(cupy, name, getattr(np, name))
    cupy.RawModule, cupy.RawKernel = raw.RawModule, raw.RawKernel
    cupy.cuda = cuda.make()
    cupyx.scatter_add = scatter_add
    cupyx.allow_synchronize = allow_synchronize
    return {"cupy": cupy, "cupyx": cupyx}


def install(monkeypatch=None) -> ModuleType:
    """Put them there, until ``monkeypatch`` takes them away; returns ``cupy``."""
    from tests.strict_cupy import twins  # noqa: F401

    made = make()
    counts.reset()
    if monkeypatch is not None:
        monkeypatch.setattr(counts, "backend", None)
    for name, module in made.items():
        if monkeypatch is None:
            sys.modules[name] = module
        else:
            monkeypatch.setitem(sys.modules, name, module)
    return made["cupy"]


def scatter_add(a, slices, value):
    """CuPy's, which has atomic additions for these types alone."""
    if a.dtype.name not in ("int32", "int64", "float16", "float32", "float64", "uint32", "uint64"):
        raise TypeError(f"cupyx.scatter_add only supports ... as data type, not {a.dtype}")
    counts.kernel("scatter_add")
    rows = slices._a if isinstance(slices, ndarray) else slices
    np.add.at(a._a, rows, value._a if isinstance(value, ndarray) else value)


class allow_synchronize:
    """A context in which the host may wait, or may not: then it is an error."""

    def __init__(self, allow):
        self._allow = allow

    def __enter__(self):
        self._before, counts.allowed = counts.allowed, self._allow
        return self

    def __exit__(self, *exception):
        counts.allowed = self._before
