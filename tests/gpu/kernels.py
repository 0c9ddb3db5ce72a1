"""Stage 1: each kernel beside its twin in float64, and how fast it moves memory."""

import numpy as np

from mpitrain.arrays import array_namespace
from mpitrain.kernels import HOST, kernels_of
from mpitrain.kernels.host import AdamOptions, SGDOptions
from tests.gpu.check import Check

#: Errors that are nearly right, relative to the largest number.
NEAR = {"float64": 1e-12, "float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}
MOMENTS = AdamOptions(0.9, 0.99, 1e-3, 0.1, True)
MOMENTUM = SGDOptions(0.9, 0.1, True)


def kinds():
    """The types, bfloat16 where CuPy has it."""
    import cupy

    names = ["float64", "float32", "float16"]
    if int(cupy.__version__.partition(".")[0]) >= 14:
        names.append("bfloat16")
    return names


def dtype(name):
    if name != "bfloat16":
        return np.dtype(name)
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16)


def drawn(name, *shape, seed=0):
    """Numbers of a type, on the host."""
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(dtype(name))


def close(name, found, right):
    """``AssertionError`` if what the device gave is not nearly right."""
    import cupy

    for own, wanted in zip(found, right, strict=True):
        own = cupy.asnumpy(own).astype(np.float64)
        wanted = np.asarray(wanted, np.float64)
        size = max(1.0, float(np.abs(wanted).max(initial=0)))
        error = float(np.abs(own - wanted).max(initial=0)) / size
        assert error <= NEAR[name], f"{name}: off by {error:.2g} of the largest number"


def beside(act, *shapes, of=None):
    """``act(kernels, *arrays)`` on the device and, in float64, on the host."""

    def check():
        import cupy

        for name in of or kinds():
            for rows in (1, 3, 257):
                host = [
                    drawn(name, *((rows, *shape[1:]) if shape[:1] == (0,) else shape), seed=n)
                    for n, shape in enumerate(shapes)
                ]
                device = [cupy.asarray(x) for x in host]
                found = act(kernels_of(device[0]), *device)
                close(name, found, act(HOST, *(x.astype(np.float64) for x in host)))
        return f"{', '.join(of or kinds())}; 1, 3 and 257 rows"

    return check


def in_place(method, *arguments):
    def act(kernels, *arrays):
        own = [x.copy() for x in arrays]
        own[-1] = abs(own[-1])
        getattr(kernels, method)(*own, *arguments)
        return own

    return act


def scatter_add(kernels, values):
    rows = array_namespace(values).arange(len(values)) % 7 - 1
    return [kernels.scatter_add(rows, values, 40)]


def loss(kernels, rows):
    labels = array_namespace(rows).arange(len(rows)) % rows.shape[1]
    return [*kernels.softmax_loss(rows, labels, 3.0, 0.1)]


def softmax(kernels, gradient):
    scores = gradient[:, None] * gradient[:, :, None]
    attention = kernels.causal_softmax(scores, 0.3)
    return [attention.copy(), kernels.causal_softmax_gradient(scores * 2, attention, 0.3)]


def norm(kernels, x, dy, weight, bias):
    y, normal, scale = kernels.layer_norm(x, weight, bias, 1e-2)
    dx = kernels.layer_norm_gradient(dy, weight, normal, scale)
    plain = kernels.normalise(x, 1e-2)[0]
    along = kernels.normalise_gradient(dy.copy(), normal, scale)
    return [y, dx, plain, along, *kernels.norm_gradients(dy, normal)]


def bandwidth():
    """GB/s of each stream of memory; nothing to show on the stand-in."""
    import cupy

    if hasattr(cupy, "machine"):
        return "on a GPU alone"
    n = 1 << 26
    x = cupy.ones(n, np.float32)
    kernels = kernels_of(x)
    ways = {
        "gelu": (lambda: kernels.gelu(x), 3),
        "adam": (lambda: kernels.adam(x, x, x, x, MOMENTS, 1, 0.0, 1.0), 8),
        "square_sum": (lambda: kernels.square_sum([x]), 1),
    }
    told = []
    for name, (act, passes) in ways.items():
        act()
        start, end = cupy.cuda.Event(), cupy.cuda.Event()
        start.record()
        for _ in range(5):
            act()
        end.record()
        end.synchronize()
        seconds = cupy.cuda.get_elapsed_time(start, end) / 5e3
        told.append(f"{name} {passes * 4 * n / seconds / 1e9:.0f} GB/s")
    return ", ".join(told)


CHECKS = [
    Check(1, "kernels.gelu", beside(lambda k, x: [*k.gelu(x)], (0, 50))),
    Check(1, "kernels.gelu gradient", beside(lambda k, *x: [k.gelu_gradient(*x)], *[(0, 50)] * 3)),
    Check(1, "kernels.norms", beside(norm, (0, 70), (0, 70), (70,), (70,)), seconds=120.0),
    Check(1, "kernels.causal softmax", beside(softmax, (0, 33))),
    Check(1, "kernels.softmax loss", beside(loss, (0, 130), of=["float64", "float32"])),
    Check(1, "kernels.scatter add", beside(scatter_add, (0, 9))),
    Check(1, "kernels.sgd", beside(in_place("sgd", MOMENTUM, 0.1, 0.5), *[(0,)] * 3)),
    Check(1, "kernels.adam", beside(in_place("adam", MOMENTS, 3, 0.1, 0.5), *[(0,)] * 4)),
    Check(1, "kernels.square sum",
          beside(lambda k, x: [k.square_sum([x, x[:1]])], (0,), of=["float64"])),
    Check(1, "kernels.matmul", beside(lambda k, a, b: [k.matmul(a, b)], (2, 9, 16), (16, 5))),
    Check(1, "kernels.GB/s", bandwidth),
]  # fmt: skip
