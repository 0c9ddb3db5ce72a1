"""An array on a device that does not exist: it has memory of the host, and refuses the host's.

No subclass of ``numpy.ndarray``: what CuPy refuses is refused here, with its words.
"""

from functools import partial
from types import SimpleNamespace

import numpy as np
from mpi4py import MPI
from numpy.lib.mixins import NDArrayOperatorsMixin

from tests.queued_cupy.counts import caller, counts
from tests.queued_cupy.signatures import METHODS, check

_VIEWS = ("ravel", "reshape", "swapaxes", "transpose", "view")


def unwrapped(value, where):
    """The host's array behind a device's; ``TypeError`` for an array of the host."""
    if isinstance(value, ndarray):
        if value.size and value._memory is not None:
            counts.backend.expect_here(value._memory.device_id, where)
        return value._a
    if isinstance(value, np.ndarray):
        raise TypeError(f"Unsupported type <class 'numpy.ndarray'> ({where})")
    if isinstance(value, (list, tuple)):
        return type(value)(unwrapped(one, where) for one in value)
    return value


def launch(name, run, *, kernels=1, reads=(), writes=(), out=None, like=None):
    """Where every kernel goes through: counted, and queued; returns ``out`` or a new array.

    Args:
        name: of the operation.
        run: does it on arrays of the host, and returns its result.  It must not keep a device's
            array alive, as a queued kernel does not.
        kernels: that CuPy would launch.
        reads: arrays of the host that it reads or writes, but for the result.
        writes: those among them that it writes instead of making a result.
        out: the device's array that it writes.
        like: makes an array as the result is, but for the numbers, where ``run`` fails on others.
    """
    counts.kernel(name, kernels)
    writes = writes if out is None else [out._a]
    made = counts.backend.compute(name, run, reads, writes, like or run)
    return made if out is None else out


def awaited(why):
    """The host waits, as the result depends on the values."""
    counts.sync(why)
    counts.backend.settle()


class ndarray(NDArrayOperatorsMixin):
    """See the module."""

    __module__ = "cupy"
    __hash__ = None
    __array_priority__ = 100
    __slots__ = ("__weakref__", "_a", "_memory")

    def __init__(self, shape, dtype=float, memptr=None, strides=None, order="C"):
        kind = np.dtype(dtype)
        if kind.hasobject or kind.names:
            raise ValueError(f"Unsupported dtype {kind}")
        nbytes = int(np.prod(shape)) * kind.itemsize
        self._memory = memptr = memptr or counts.backend.alloc(nbytes)
        buffer = MPI.buffer.fromaddress(memptr.ptr, nbytes) if nbytes else None
        self._a = np.ndarray(shape, kind, buffer, strides=strides, order=order)

    @classmethod
    def of(cls, array, memory=None):
        """Around an array of the host, without a copy."""
        made = object.__new__(cls)
        made._a, made._memory = array, memory
        return made

    dtype = property(lambda self: self._a.dtype)
    itemsize = property(lambda self: self._a.itemsize)
    nbytes = property(lambda self: self._a.nbytes)
    ndim = property(lambda self: self._a.ndim)
    shape = property(lambda self: self._a.shape)
    size = property(lambda self: self._a.size)
    strides = property(lambda self: self._a.strides)
    T = property(lambda self: ndarray.of(self._a.T, self._memory))

    @property
    def flags(self):  # CuPy's do not say ``writeable``
        own = self._a.flags
        return SimpleNamespace(c_contiguous=own.c_contiguous, f_contiguous=own.f_contiguous)

    @property
    def device(self):
        return counts.backend.Device(getattr(self._memory, "device_id", None))

    @property
    def data(self):
        start = self._a.__array_interface__["data"][0]
        return MemoryPointer(start, getattr(self._memory, "mem", None))

    @property
    def __cuda_array_interface__(self):
        own = self._a.__array_interface__
        return {key: own[key] for key in ("shape", "typestr", "descr")} | {
            "strides": None if self._a.flags.c_contiguous else self._a.strides,
            "data": (own["data"][0] if self._a.size else 0, False),
            "version": 3,
            "stream": 1,
        }

    def __len__(self):
        return len(self._a)

    def __array__(self, *given, **named):
        raise TypeError(
            "Implicit conversion to a NumPy array is not allowed. Please use `.get()` to construct "
            "a NumPy array explicitly."
        )

    def __dlpack_device__(self):
        return 1, 0  # for torch on the CPU, which stands for torch on a GPU

    @property
    def __dlpack__(self):
        if not counts.backend.machine.prompt:  # mpi4py shall take the CUDA array interface
            raise AttributeError("__dlpack__")
        return self._dlpack

    def _dlpack(self, **_):
        from torch.utils.dlpack import to_dlpack

        from mpitrain.adapters.torch.arrays import as_tensor

        own = self._a  # whose memory torch keeps
        kept = SimpleNamespace(__array_interface__=own.__array_interface__, array=self)
        return to_dlpack(as_tensor(np.asarray(kept).view(own.dtype)))

    def __iter__(self):
        if not self.ndim:
            raise TypeError("iteration over a 0-d array")
        return (self[index] for index in range(len(self._a)))

    def __repr__(self):
        return f"cupy.ndarray({self._a!r})"

    def __imatmul__(self, other):
        return self @ other  # CuPy's makes a new array

    def __array_ufunc__(self, ufunc, method, *inputs, **named):
        if method != "__call__":
            return NotImplemented
        out = named.pop("out", None)
        if out is not None:
            named["out"] = out[0]
        return elementwise(ufunc, *inputs, **named)

    def __array_function__(self, function, types, given, named):
        import cupy

        own = getattr(cupy, function.__name__, None)
        if own is None or not all(issubclass(one, (ndarray, np.generic)) for one in types):
            return NotImplemented
        return own(*given, **named)

    def __getitem__(self, key):
        keys, selects = _read_key(key)
        if selects:
            if masks := sum(_is_mask(one) for one in _keys(key)):
                awaited("boolean mask read")
            given = unwrapped(self, "take")
            first = tuple(_first(one) for one in keys)
            return launch(
                "take",
                lambda: given[keys],
                kernels=1 + 2 * masks,
                reads=[given, *(one for one in keys if isinstance(one, np.ndarray))],
                like=lambda: given[first],
            )
        found = self._a[keys]
        if not isinstance(found, np.ndarray):
            found = self._a[(*keys, None)].reshape(())
        return ndarray.of(found, self._memory)

    def __setitem__(self, key, value):
        if isinstance(value, np.ndarray) and value.size != 1:
            raise ValueError("non-scalar numpy.ndarray cannot be used for fill")
        if isinstance(value, (list, tuple)):
            raise ValueError(f"{type(value).__name__} cannot be used for fill")
        keys, selects = _read_key(key)
        if masks := sum(_is_mask(one) for one in _keys(key)):
            awaited("boolean mask write")
        source = unwrapped(value, "fill") if isinstance(value, ndarray) else value
        target = unwrapped(self, "fill")
        part = target if selects else target[(*keys, None)]  # a view, of one element, too
        launch(
            "fill",
            lambda: target.__setitem__(keys, source),
            kernels=1 + 2 * masks,
            reads=[one for one in (part, source, *keys) if isinstance(one, np.ndarray)],
            writes=[part],
        )

    def get(self, stream=None, order="C", out=None, blocking=True):
        if out is None:
            out = np.empty_like(self._a, order=order)
        if type(out) is not np.ndarray or out.dtype != self.dtype or out.shape != self.shape:
            raise TypeError(f"Only numpy.ndarray of {self.dtype}, {self.shape} can be obtained")
        if blocking:
            out[...] = self._read("get()")
        else:
            counts.backend.leave(out, unwrapped(self, "get"))
        return out

    def set(self, arr, stream=None):
        if type(arr) is not np.ndarray:
            raise TypeError(f"Only numpy.ndarray can be set to cupy.ndarray, not {type(arr)}")
        if arr.dtype != self.dtype or arr.shape != self.shape:
            raise TypeError(f"{arr.dtype} array of {arr.shape} cannot be set to {self.dtype}")
        counts.backend.write(self._a, arr, stream)

    def _read(self, why):
        """The array of the host, when all that was queued before is done."""
        counts.sync(why)
        return counts.backend.read(unwrapped(self, why))

    def nonzero(self):
        awaited("nonzero()")
        found = [partial(np.asarray, one) for one in self._a.nonzero()]
        return tuple(launch("nonzero", one, kernels=3 * (n == 0)) for n, one in enumerate(found))


class MemoryPointer:
    """Where an array begins; it keeps the memory."""

    def __init__(self, ptr, mem):
        self.ptr, self.mem = ptr, mem

    device_id = property(lambda self: getattr(self.mem, "device_id", 0))


def _keys(key):
    return key if isinstance(key, tuple) else (key,)


def _read_key(key):
    """The index for NumPy, and whether it selects elements one by one."""
    keys = _keys(key)
    selects = any(isinstance(one, (ndarray, np.ndarray, list)) for one in keys)
    return tuple(one._a if isinstance(one, ndarray) else one for one in keys), selects


def _first(key):
    """An index of as many elements, which are there."""
    is_index = isinstance(key, np.ndarray) and key.dtype != bool
    return np.zeros_like(key) if is_index else key


def _is_mask(key):
    return isinstance(key, ndarray) and key.dtype == bool


def elementwise(ufunc, *inputs, out=None, dtype=None, casting="same_kind"):
    """One kernel."""
    name = ufunc.__name__
    if name == "matmul":
        return matmul(*inputs, out=out)
    arrays = [unwrapped(one, name) for one in inputs]
    if out is not None and not isinstance(out, ndarray):
        raise TypeError(f"Output arguments type must be cupy.ndarray, not {type(out)}")
    options = {} if dtype is None else {"dtype": dtype}
    if out is not None:
        options |= {"out": unwrapped(out, name), "casting": casting}
    given = [one for one in arrays if isinstance(one, np.ndarray)]
    return launch(name, partial(ufunc, *arrays, **options), reads=given, out=out)


def matmul(a, b, out=None):
    """CuPy's: of two matrices one GEMM, which adds 16-bit numbers up in float32."""
    left, right = unwrapped(a, "matmul"), unwrapped(b, "matmul")
    if left.ndim != right.ndim:
        counts.broadcast_matmuls[caller()] += 1
    copies = left.ndim != right.ndim or (left.ndim > 2 and left.dtype.itemsize <= 2)
    kernels = 3 if copies else 1

    def run():
        if left.dtype.itemsize <= 2 and left.dtype.kind != "i":
            wide = left.astype(np.float32) @ right.astype(np.float32)
            return wide.astype(left.dtype)
        return left @ right

    target = None if out is None else out._a
    act = run if out is None else lambda: np.copyto(target, run())
    return launch("matmul", act, kernels=kernels, reads=[left, right], out=out)


def _method(name, text):
    def call(self, *given, **named):
        check(f"ndarray.{name}", text, given, named)
        arguments = [unwrapped(one, name) for one in given]
        keywords = {key: unwrapped(value, name) for key, value in named.items()}
        before = self._a if name in _VIEWS else unwrapped(self, name)

        def run():
            return getattr(before, name)(*arguments, **keywords)

        if name not in _VIEWS:
            if name == "astype" and not named.get("copy", True) and before.dtype == given[0]:
                return self
            reads = [self._a, *(one for one in arguments if isinstance(one, np.ndarray))]
            return launch(name, run, reads=reads, out=named.get("out"))
        found = run()
        if found.size and not np.shares_memory(found, before):
            return launch("copy", run, reads=[before])  # CuPy's contiguous copy
        return ndarray.of(found, self._memory)

    call.__name__ = name
    return call


def _conversion(name, convert):
    return lambda self, *given: convert(self._read(f"{name}()"), *given)


for _name, _text in METHODS.items():
    setattr(ndarray, _name, _method(_name, _text))
for _name in ("item", "tobytes", "tolist", "__bool__", "__float__", "__index__", "__int__"):
    setattr(ndarray, _name, _conversion(_name, getattr(np.ndarray, _name)))
