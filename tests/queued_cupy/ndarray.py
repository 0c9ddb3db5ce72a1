"""Arrays in queued memory: no subclass of NumPy's, and never NumPy's without being asked."""

import ctypes
from functools import partial

import numpy as np

from tests.queued_cupy.machine import Range, view_at
from tests.strict_cupy.base import DeviceArray


def bounds(array):
    """The bytes of an array of the host's."""
    return Range(*np.lib.array_utils.byte_bounds(array)) if array.size else Range(0, 0)


class ndarray(DeviceArray):
    """As CuPy's; ``_a`` is the memory as the executor sees it, ``_memory`` keeps it."""

    __array_ufunc__ = None

    def __init__(self, shape, dtype=float, memptr=None):
        kind = np.dtype(dtype)
        count = int(np.prod(shape))
        if memptr is None:
            memptr = self.runtime.alloc(count * kind.itemsize)
        self._memory = memptr
        raw = view_at(memptr.ptr, count * kind.itemsize) if count else np.empty(0, np.uint8)
        self._a = raw.view(kind).reshape(shape)

    #: Of the module that has this class; one for each machine.
    runtime = None

    def of(self, array):
        """A view of the same memory."""
        made = object.__new__(type(self))
        made._a, made._memory = array, self._memory
        return made

    T = property(lambda self: self.of(self._a.T))
    device = property(lambda self: self.runtime.Device(self._memory.device_id))

    @property
    def data(self):
        return self.runtime.MemoryPointer(self._memory.mem, bounds(self._a).start, absolute=True)

    def __getitem__(self, key):
        found = self._a[key]
        return self.of(found if isinstance(found, np.ndarray) else self._a[key, None].reshape(()))

    def __setitem__(self, key, value):
        if isinstance(value, np.ndarray) and value.size != 1:
            raise ValueError("non-scalar numpy.ndarray cannot be used for fill")
        part = self[key]
        target = part._a
        source, reads = (value._a, [value]) if isinstance(value, ndarray) else (value, [])
        self.runtime.launch("fill", lambda: np.copyto(target, source, "unsafe"), reads, [part])

    def reshape(self, *shape, order="C"):
        return self.of(self._a.reshape(*shape, order=order))

    def ravel(self):
        return self.of(self._a.reshape(-1))

    def view(self, dtype=None):
        return self.of(self._a.view(dtype))

    def copy(self):
        return self.runtime.computed("copy", np.copy, self)

    def astype(self, dtype, copy=True):
        return self.runtime.computed("astype", lambda a: a.astype(dtype), self)

    def get(self, stream=None):
        """A copy on the current stream, for which the host waits."""
        runtime = self.runtime
        found, source = np.empty(self.shape, self.dtype), self._a
        op = runtime.launch("get", lambda: np.copyto(found, source), [self], [])
        runtime.machine.finish(op)
        return found

    def set(self, arr, stream=None):
        """On a stream, from pinned memory: read when the copy is done, and kept by nobody."""
        if type(arr) is not np.ndarray or arr.dtype != self.dtype:
            raise TypeError(f"{type(arr).__name__} of {arr.dtype} into {self.dtype}")
        target = self._a
        if stream is None:
            values = arr.copy().reshape(self.shape)
            self.runtime.launch("set", lambda: np.copyto(target, values), [], [self])
            return
        where, machine = bounds(arr), self.runtime.machine
        copy = partial(ctypes.memmove, bounds(target).start, where.start, arr.nbytes)
        machine.launch(stream.queue(), "set", copy, [where], [bounds(target)])

    def item(self):
        return self.get().item()

    def __bool__(self):
        return bool(self.get())

    def __int__(self):
        return int(self.get())

    def __float__(self):
        return float(self.get())


def _reduced(name):
    return lambda self: self.runtime.computed(name, lambda a: np.asarray(getattr(a, name)()), self)


for _name in ("all", "any", "max", "min", "sum"):
    setattr(ndarray, _name, _reduced(_name))


def _operator(ufunc, *, swapped=False):
    def apply(self, other):
        return self.runtime.ufunc(ufunc, *((other, self) if swapped else (self, other)))

    return apply


def _in_place(ufunc):
    def apply(self, other):
        self.runtime.ufunc(ufunc, self, other, out=self)
        return self

    return apply


_OPERATORS = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "truediv": np.true_divide,
    "mod": np.remainder, "matmul": np.matmul,
}  # fmt: skip
for _name, _ufunc in _OPERATORS.items():
    setattr(ndarray, f"__{_name}__", _operator(_ufunc))
    setattr(ndarray, f"__r{_name}__", _operator(_ufunc, swapped=True))
    setattr(ndarray, f"__i{_name}__", _in_place(_ufunc))
ndarray.__eq__, ndarray.__ne__ = _operator(np.equal), _operator(np.not_equal)
