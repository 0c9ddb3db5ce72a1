"""The functions of ``cupy`` that the stand-in has."""

import numpy as np

from tests.strict_cupy.counts import counts
from tests.strict_cupy.ndarray import elementwise, launch, ndarray, unwrapped, wrapped
from tests.strict_cupy.signatures import FUNCTIONS, check

#: Without a kernel.
_VIEWS = ("broadcast_to", "moveaxis", "split")


def function(name):
    """CuPy's function of this name, which computes as NumPy's."""
    text = FUNCTIONS[name]

    def call(*given, **named):
        check(name, text, given, named)
        out = named.get("out")
        arguments = [unwrapped(one, name) for one in given]
        keywords = {key: unwrapped(value, name) for key, value in named.items()}
        if name not in ("full_like", "zeros_like", "ones_like", "where", *_NEW) and not any(
            isinstance(one, (ndarray, list, tuple)) for one in given
        ):
            raise TypeError(f"cupy.{name}() needs a cupy.ndarray, not {type(given[0])}")

        def run():
            if name == "zeros_like" and counts.timeline is not None:  # memory that nobody touches
                return np.zeros(arguments[0].shape, arguments[0].dtype)
            return getattr(np, name)(*arguments, **keywords)

        if name in _VIEWS:
            return wrapped(run())
        given = [one for one in arguments if isinstance(one, np.ndarray)]
        found = launch(name, run, reads=given, writes=() if out is None else [out._a])
        return out if out is not None else wrapped(found)

    call.__name__ = name
    return call


#: Made from nothing of the device's.
_NEW = ("arange", "full", "ones", "zeros")


def empty(shape, dtype=float, order="C"):
    return ndarray(shape, dtype, order=order)


def empty_like(prototype, dtype=None, order="K", subok=None, shape=None):
    _expect(prototype, "empty_like")
    return ndarray(prototype.shape if shape is None else shape, dtype or prototype.dtype)


def array(obj, dtype=None, copy=True, order="K", subok=False, ndmin=0, *, blocking=False):
    if isinstance(obj, ndarray):
        given, kind = unwrapped(obj, "copy"), obj.dtype if dtype is None else dtype
        copy, like = lambda: np.array(given, dtype, order=order), lambda: np.empty(obj.shape, kind)
        return wrapped(launch("copy", copy, reads=[given], like=like))
    if isinstance(obj, (list, tuple)) and any(isinstance(one, ndarray) for one in obj):
        return stacked(obj, dtype)
    counts.uploads += 1
    if blocking:
        counts.sync("array(blocking=True)")
    values = np.array(obj, dtype, order=order, ndmin=ndmin)
    return ndarray.of(values) if counts.backend is None else launch("fill", lambda: values)


def stacked(obj, dtype):
    """One array of a list of arrays."""
    return wrapped(launch("concatenate", lambda: np.array([one._a for one in obj], dtype)))


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
    launch("copy", copy, reads=[to, given], writes=[to], like=lambda: None)


def from_dlpack(array):
    """torch's tensors on the CPU stand for those on a GPU."""
    from mpitrain.adapters.torch.arrays import as_array

    return ndarray.of(as_array(array))


def nonzero(a):
    _expect(a, "nonzero")
    return a.nonzero()


def bincount(x, weights=None, minlength=None):
    _expect(x, "bincount")
    counts.sync("bincount()")  # how long it is depends on the values
    given = None if weights is None else weights._a
    found = launch("bincount", lambda: np.bincount(x._a, given, minlength or 0), kernels=3)
    return wrapped(found)


def array_equal(a1, a2, equal_nan=False):
    one, other = a1._a, a2._a
    compared = lambda: np.array_equal(one, other)  # noqa: E731
    return wrapped(launch("array_equal", compared, kernels=2, reads=[one, other]))


def pad(array, pad_width, mode="constant"):
    _expect(array, "pad")
    found = launch("pad", lambda: np.pad(array._a, pad_width, mode), kernels=2)
    return wrapped(found)


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


#: Written out above.
BY_HAND = {
    "array": array,
    "array_equal": array_equal,
    "asarray": asarray,
    "ascontiguousarray": ascontiguousarray,
    "asnumpy": asnumpy,
    "bincount": bincount,
    "copyto": copyto,
    "empty": empty,
    "empty_like": empty_like,
    "from_dlpack": from_dlpack,
    "nonzero": nonzero,
    "pad": pad,
}
