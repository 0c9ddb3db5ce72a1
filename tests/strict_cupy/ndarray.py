"""An array on a device that does not exist: it has memory of the host, and refuses the host's.

No subclass of ``numpy.ndarray``: what CuPy refuses is refused here, with its words.
"""

import numpy as np
from mpi4py import MPI

from tests.strict_cupy.counts import caller, counts
from tests.strict_cupy.memory import POISON
from tests.strict_cupy.signatures import METHODS, check

_VIEWS = ("ravel", "reshape", "swapaxes", "transpose", "view")


def unwrapped(value, where):
    """The host's array behind a device's; ``TypeError`` for an array of the host."""
    if isinstance(value, ndarray):
        if counts.backend is not None and value.size and value._memory is not None:
            counts.backend.expect_here(value._memory.device_id, where)
        return value._a
    if isinstance(value, np.ndarray):
        raise TypeError(f"Unsupported type <class 'numpy.ndarray'> ({where})")
    if isinstance(value, (list, tuple)):
        return type(value)(unwrapped(one, where) for one in value)
    return value


def wrapped(value):
    """The device's array of what NumPy gave, a scalar too: it lies on the device."""
    if isinstance(value, (np.ndarray, np.generic)):
        return ndarray.of(np.asarray(value))
    if isinstance(value, (list, tuple)):
        return type(value)(wrapped(one) for one in value)
    return value


def launch(name, run, *, kernels=1, reads=(), writes=(), like=None, flops=0):
    """Where every kernel goes through: counted, and done at once or queued.

    Args:
        name: of the operation.
        run: does it on arrays of the host, and returns its result.  It must not keep a device's
            array alive, as a queued kernel does not.
        kernels: that CuPy would launch.
        reads: arrays of the host that it reads or writes, but for the result.
        writes: those among them that it writes instead of making a result.
        like: makes an array as the result is, but for the numbers.
        flops: of its products.
    """
    counts.kernel(name, kernels)
    if counts.timeline is not None:
        return counts.timeline.launch(name, run, like, reads, kernels, flops)
    if counts.backend is not None:
        return counts.backend.compute(name, run, reads, writes)
    with np.errstate(all="ignore"):  # a GPU raises no flags
        return run()


class Flags:
    """CuPy's, which do not say ``writeable``."""

    def __init__(self, flags):
        self.c_contiguous, self.f_contiguous = flags.c_contiguous, flags.f_contiguous
        self.owndata, self.forc = flags.owndata, flags.forc


class Device:
    """A GPU as arrays name it."""

    def __init__(self, number):
        self.id = number

    def __eq__(self, other):
        return self.id == other.id

    def __hash__(self):
        return hash(self.id)


class ndarray:
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
        if memptr is None and counts.backend is not None:
            memptr = counts.backend.alloc(nbytes)
        self._memory = memptr
        if memptr is None:
            timed = counts.timeline is not None
            poisoned = np.empty(nbytes, np.uint8) if timed else np.full(nbytes, POISON, np.uint8)
            self._a = np.ndarray(shape, kind, poisoned, order=order)
            return
        if not nbytes:
            self._a = np.empty(shape, kind)
            return
        buffer = MPI.buffer.fromaddress(memptr.ptr, nbytes)
        self._a = np.frombuffer(buffer, kind).reshape(shape)

    @classmethod
    def of(cls, array, memory=None):
        """Around an array of the host, without a copy."""
        made = object.__new__(cls)
        made._a, made._memory = array, memory
        return made

    dtype = property(lambda self: self._a.dtype)
    flags = property(lambda self: Flags(self._a.flags))
    itemsize = property(lambda self: self._a.itemsize)
    nbytes = property(lambda self: self._a.nbytes)
    ndim = property(lambda self: self._a.ndim)
    shape = property(lambda self: self._a.shape)
    size = property(lambda self: self._a.size)
    strides = property(lambda self: self._a.strides)
    T = property(lambda self: ndarray.of(self._a.T, self._memory))
    base = property(lambda self: None if self._a.base is None else self)

    @property
    def device(self):
        if counts.backend is not None:
            return counts.backend.Device(self._memory.mem.device_id)
        return Device(0)

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
        if counts.backend is not None:  # mpi4py shall take the CUDA array interface
            raise AttributeError("__dlpack__")
        return self._dlpack

    def _dlpack(self, **_):
        from torch.utils.dlpack import to_dlpack

        from mpitrain.adapters.torch.arrays import as_tensor

        return to_dlpack(as_tensor(self._a))

    def __iter__(self):
        if not self.ndim:
            raise TypeError("iteration over a 0-d array")
        return (self[index] for index in range(len(self._a)))

    def __repr__(self):
        return f"cupy.ndarray({self._a!r})"

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
                counts.sync("boolean mask read")
            kernels, taken = 1 + 2 * masks, self._a
            return wrapped(launch("take", lambda: taken[keys], kernels=kernels, reads=[taken]))
        found = self._a[keys]
        if not isinstance(found, np.ndarray):
            found = self._a[(*keys, None)].reshape(())
        return ndarray.of(found, self._memory)

    def __setitem__(self, key, value):
        if isinstance(value, np.ndarray) and value.size != 1:
            raise ValueError("non-scalar numpy.ndarray cannot be used for fill")
        if isinstance(value, (list, tuple)):
            raise ValueError(f"{type(value).__name__} cannot be used for fill")
        keys, _ = _read_key(key)
        if masks := sum(_is_mask(one) for one in _keys(key)):
            counts.sync("boolean mask write")
        source = unwrapped(value, "fill") if isinstance(value, ndarray) else value
        target = unwrapped(self, "fill")
        part = target[(*keys, None)]  # a view, of one element, too
        launch(
            "fill",
            lambda: target.__setitem__(keys, source),
            kernels=1 + 2 * masks,
            reads=[one for one in (part, source) if isinstance(one, np.ndarray)],
            writes=[part],
            like=lambda: None,
        )

    def get(self, stream=None, order="C", out=None, blocking=True):
        if out is None:
            out = np.empty_like(self._a, order=order)
        if type(out) is not np.ndarray or out.dtype != self.dtype or out.shape != self.shape:
            raise TypeError(f"Only numpy.ndarray of {self.dtype}, {self.shape} can be obtained")
        if blocking:
            found = self._read("get()")
            out[...] = found if counts.timeline is None else 0
        else:
            out.reshape(-1).view(np.uint8)[...] = POISON
            counts.leaving.append((out, self._a.copy()))
        return out

    def set(self, arr, stream=None):
        if type(arr) is not np.ndarray:
            raise TypeError(f"Only numpy.ndarray can be set to cupy.ndarray, not {type(arr)}")
        if arr.dtype != self.dtype or arr.shape != self.shape:
            raise TypeError(f"{arr.dtype} array of {arr.shape} cannot be set to {self.dtype}")
        counts.uploads += 1
        if counts.timeline is not None:
            counts.timeline.upload(self.nbytes, stream)
        if counts.backend is not None:
            counts.backend.write(self._a, arr, stream)
        else:
            self._a[...] = arr

    def _read(self, why):
        """The array of the host, when all that was queued before is done."""
        counts.sync(why)
        found = unwrapped(self, why)
        return found if counts.backend is None else counts.backend.read(found)

    def item(self):
        return self._read("item()").item()

    def nonzero(self):
        counts.sync("nonzero()")
        return wrapped(launch("nonzero", self._a.nonzero, kernels=3))

    def tobytes(self, order="C"):
        return self._read("tobytes()").tobytes(order)

    def tolist(self):
        return self._read("tolist()").tolist()

    def __float__(self):
        return float(self._read("float()"))

    def __int__(self):
        return int(self._read("int()"))

    def __index__(self):
        return self._read("index()").__index__()

    def __bool__(self):
        return bool(self._read("bool()"))


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
    counts.uploads += sum(isinstance(one, (np.ndarray, list)) for one in keys)
    return tuple(one._a if isinstance(one, ndarray) else one for one in keys), selects


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
    target = None if out is None else unwrapped(out, name)

    def run():
        if target is None:
            return ufunc(*arrays, **options)
        ufunc(*arrays, out=target, casting=casting, **options)

    given = [one for one in arrays if isinstance(one, np.ndarray)]

    def like():
        if target is not None:
            return target
        few = [np.empty(0, a.dtype) if isinstance(a, np.ndarray) else a for a in arrays]
        return np.empty(
            np.broadcast_shapes(*(a.shape for a in given)), ufunc(*few, **options).dtype
        )

    # Integers are indices, and must be right.
    exact = all(one.dtype.kind in "biu" for one in given)
    writes = () if out is None else [target]
    found = launch(name, run, reads=given, writes=writes, like=None if exact else like)
    return wrapped(found) if out is None else out


def matmul(a, b, out=None):
    """CuPy's: of two matrices one GEMM, which adds 16-bit numbers up in float32."""
    left, right = unwrapped(a, "matmul"), unwrapped(b, "matmul")
    if left.ndim != right.ndim:
        counts.broadcast_matmuls[caller()] += 1
    copies = left.ndim != right.ndim or (left.ndim > 2 and left.dtype.itemsize <= 2)
    kernels = 3 if copies else 1
    target = None if out is None else out._a

    def run():
        if left.dtype.itemsize <= 2 and left.dtype.kind != "i":
            wide = left.astype(np.float32) @ right.astype(np.float32)
            found = wide.astype(left.dtype)
        else:
            found = left @ right
        if target is None:
            return found
        target[...] = found
        return None

    def like():
        shape = np.broadcast_shapes(left.shape[:-2], right.shape[:-2])
        return np.empty((*shape, left.shape[-2], right.shape[-1]), left.dtype)

    products = like().size * left.shape[-1] if counts.timeline is not None else 0
    found = launch(
        "matmul", run, kernels=kernels, reads=[left, right], flops=2 * products,
        writes=() if out is None else [target], like=like if out is None else None,
    )  # fmt: skip
    return wrapped(found) if out is None else out


def _operator(name, ufunc, *, swapped=False):
    def apply(self, other):
        if isinstance(other, str) or other is None:
            return NotImplemented
        return elementwise(ufunc, *((other, self) if swapped else (self, other)))

    apply.__name__ = name
    return apply


def _in_place(name, ufunc):
    def apply(self, other):
        elementwise(ufunc, self, other, out=self)
        return self

    apply.__name__ = name
    return apply


_OPERATORS = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "truediv": np.true_divide,
    "floordiv": np.floor_divide,
    "mod": np.remainder,
    "pow": np.power,
    "matmul": np.matmul,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
for _name, _ufunc in _OPERATORS.items():
    setattr(ndarray, f"__{_name}__", _operator(_name, _ufunc))
    setattr(ndarray, f"__r{_name}__", _operator(_name, _ufunc, swapped=True))
    if _name != "matmul":  # CuPy's ``@=`` makes a new array
        setattr(ndarray, f"__i{_name}__", _in_place(_name, _ufunc))
_COMPARISONS = {
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
}
for _name, _ufunc in _COMPARISONS.items():
    setattr(ndarray, f"__{_name}__", _operator(_name, _ufunc))
for _name, _ufunc in {"neg": np.negative, "invert": np.invert, "abs": np.absolute}.items():
    setattr(ndarray, f"__{_name}__", lambda self, ufunc=_ufunc: elementwise(ufunc, self))


def _thin(array, axis=None, *given, **named):
    """One of the numbers along each axis that is summed over: what it gives has the right shape."""
    axes = {one % array.ndim for one in np.atleast_1d(range(array.ndim) if axis is None else axis)}
    return array[tuple(slice((axis not in axes and None) or 1) for axis in range(array.ndim))]


def _shaped(array, name, arguments, keywords):
    """A view, or memory of its shape where CuPy would copy: without the copy."""
    before = array._a
    if name not in ("reshape", "ravel"):
        return ndarray.of(getattr(before, name)(*arguments, **keywords), array._memory)
    like = np.broadcast_to(np.empty((), before.dtype), before.shape)  # of which all are views
    shape = getattr(like, name)(*arguments, **keywords).shape
    try:
        view = before.reshape(shape, copy=False)
    except ValueError:
        return wrapped(
            launch("copy", None, reads=[before], like=lambda: np.empty(shape, before.dtype))
        )
    return ndarray.of(view, array._memory)


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
            copied = {"copy": before.dtype, "astype": given[0] if given else None}.get(name)
            like = (lambda: np.empty(before.shape, copied)) if copied is not None else None
            if name in ("sum", "mean", "max", "min") and counts.timeline is not None:
                before = _thin(before, *arguments, **keywords)
            out = named.get("out")
            reads = [self._a, *(one for one in arguments if isinstance(one, np.ndarray))]
            writes = [] if out is None else [out._a]
            if name == "fill":
                writes = [self._a]
            found = launch(name, run, reads=reads, writes=writes, like=like)
            return wrapped(found) if out is None else out
        if counts.timeline is not None:
            return _shaped(self, name, arguments, keywords)
        found = run()
        if found.size and not np.shares_memory(found, before):
            if counts.backend is not None:
                return launch("copy", run, reads=[before])
            counts.kernel("copy")  # CuPy's contiguous copy
            return wrapped(found)
        return ndarray.of(found, self._memory)

    call.__name__ = name
    return call


for _name, _text in METHODS.items():
    setattr(ndarray, _name, _method(_name, _text))
