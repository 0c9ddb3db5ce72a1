"""The functions of ``cupy`` that the stand-in has."""

import numpy as np

from tests.queued_cupy.counts import counts
from tests.queued_cupy.ndarray import awaited, elementwise, launch, ndarray, unwrapped
from tests.queued_cupy.signatures import FUNCTIONS, check

#: Without a kernel.
_VIEWS = ("broadcast_to", "moveaxis", "split")


def function(name):
    """CuPy's function of this name, which computes as NumPy's."""
    text = FUNCTIONS[name]

    def call(*given, **named):
        check(name, text, given, named)
        arguments = [unwrapped(one, name) for one in given]
        keywords = {key: unwrapped(value, name) for key, value in named.items()}
        if name not in ("zeros_like", "where", *_NEW) and not any(
            isinstance(one, (ndarray, list, tuple)) for one in given
        ):
            raise TypeError(f"cupy.{name}() needs a cupy.ndarray, not {type(given[0])}")

        def run():
            return getattr(np, name)(*arguments, **keywords)

        arrays = list(_arrays([*given, *named.values()]))
        if name in _VIEWS:
            return _view(run(), arrays[0]._memory)
        return launch(name, run, reads=[one._a for one in arrays], out=named.get("out"))

    call.__name__ = name
    return call


def _arrays(given):
    """The device's among arguments, those in lists, too."""
    for one in given:
        if isinstance(one, ndarray):
            yield one
        elif isinstance(one, (list, tuple)):
            yield from _arrays(one)


def _view(found, memory):
    if isinstance(found, np.ndarray):
        return ndarray.of(found, memory)
    return [_view(one, memory) for one in found]


#: Made from nothing of the device's.
_NEW = ("arange", "full", "ones", "zeros")


def empty(shape, dtype=float, order="C"):
    return ndarray(shape, dtype, order=order)


def empty_like(prototype, dtype=None, order="K", subok=None, shape=None):
    _expect(prototype, "empty_like")
    return ndarray(prototype.shape if shape is None else shape, dtype or prototype.dtype)


def array(obj, dtype=None, copy=True, order="K", subok=False, ndmin=0, *, blocking=False):
    if isinstance(obj, ndarray):
        given = unwrapped(obj, "copy")
        return launch("copy", lambda: np.array(given, dtype, order=order), reads=[given])
    if isinstance(obj, (list, tuple)) and any(isinstance(one, ndarray) for one in obj):
        return stacked(obj, dtype)
    if blocking:
        counts.sync("array(blocking=True)")
    values = np.array(obj, dtype, order=order, ndmin=ndmin)
    return launch("fill", lambda: values)


def stacked(obj, dtype):
    """One array of a list of arrays."""
    parts = unwrapped(list(obj), "concatenate")
    return launch("concatenate", lambda: np.array(parts, dtype), reads=parts)


def asarray(a, dtype=None, order=None, *, blocking=False):
    if isinstance(a, ndarray) and (dtype is None or a.dtype == dtype):
        return a
    return array(a, dtype, order=order or "K", blocking=blocking)


def ascontiguousarray(a, dtype=None):
    if isinstance(a, ndarray) and a.flags.c_contiguous and dtype in (None, a.dtype):
        return a
    return array(a, dtype, order="C")


def asnumpy(a, stream=None, order="C", out=None, *, blocking=True):
    _expect(a, "asnumpy")
    return a.get(stream, order, out, blocking)


def copyto(dst, src, casting="same_kind", where=None):
    _expect(dst, "copyto")
    if not isinstance(src, ndarray):
        raise TypeError(f"Unsupported type {type(src)}")
    to, given = unwrapped(dst, "copyto"), unwrapped(src, "copyto")
    copy = lambda: np.copyto(to, given, casting=casting)  # noqa: E731
    launch("copy", copy, reads=[to, given], writes=[to])


def nonzero(a):
    _expect(a, "nonzero")
    return a.nonzero()


def bincount(x, weights=None, minlength=None):
    _expect(x, "bincount")
    awaited("bincount()")  # how long it is depends on the values
    given = None if weights is None else weights._a
    items = x._a
    counted = lambda: np.bincount(items, given, minlength or 0)  # noqa: E731
    return launch("bincount", counted, kernels=3, reads=[items])


def pad(array, pad_width, mode="constant"):
    _expect(array, "pad")
    given = array._a
    return launch("pad", lambda: np.pad(given, pad_width, mode), kernels=2, reads=[given])


class Ufunc:
    """One of CuPy's element-wise functions."""

    def __init__(self, name):
        self.__name__ = name
        self._numpy = getattr(np, name)

    def __call__(self, *inputs, out=None, dtype=None, casting="same_kind"):
        return elementwise(self._numpy, *inputs, out=out, dtype=dtype, casting=casting)


def _expect(value, where):
    if not isinstance(value, ndarray):
        raise TypeError(f"cupy.{where}() needs a cupy.ndarray, not {type(value)}")
