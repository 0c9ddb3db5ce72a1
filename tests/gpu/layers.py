"""Stage 5: each layer, loss and optimiser beside NumPy's, without a wait in between."""

import numpy as np

from mpitrain import nn
from mpitrain.group import TensorGroup
from mpitrain.models.recommender import SpreadTables
from mpitrain.nn.embedding import PositionEmbedding, TokenEmbedding, Unembedding
from mpitrain.objective import CrossEntropy
from mpitrain.objective.elementwise import BinaryCrossEntropy, MeanSquaredError
from mpitrain.optim.optimizers import LAMB, LARS, SGD, Adam
from tests.gpu.check import Check
from tests.gpu.kernels import close, drawn

ALONE = TensorGroup()
IMAGE, TEXT = (4, 6, 6, 8), (3, 10, 24)
#: Layers, and the shapes of their inputs; of integers, how many there are.
LAYERS = {
    "linear": (nn.Linear(24, 7), TEXT, 0),
    "bias": (nn.Bias(24), TEXT, 0),
    "layer norm": (nn.LayerNorm(24), TEXT, 0),
    "group norm": (nn.GroupNorm(2, 8), IMAGE, 0),
    "batch norm": (nn.BatchNorm(8), IMAGE, 0),
    "gelu": (nn.GELU(), TEXT, 0),
    "relu": (nn.ReLU(), TEXT, 0),
    "attention": (nn.CausalAttention(4), TEXT, 0),
    "convolution": (nn.Conv2d(8, 5, 3, padding=1), IMAGE, 0),
    "max pool": (nn.MaxPool2d(2), IMAGE, 0),
    "average pool": (nn.AveragePool2d(2), IMAGE, 0),
    "mean over the image": (nn.GlobalAveragePool(), IMAGE, 0),
    "flatten": (nn.Flatten(), IMAGE, 0),
    "positions": (PositionEmbedding(10, 24, ALONE, sequence=False), TEXT, 0),
    "tokens": (TokenEmbedding(11, 6, ALONE), (3, 10), 11),
    "scores": (Unembedding(11, 24, "tokens.token"), TEXT, 0),
    "tables": (SpreadTables(3, 9, 4, ALONE), (6, 3), 9),
    "residual": (nn.Residual({"up": nn.Linear(24, 24), "gelu": nn.GELU()}), TEXT, 0),
}


def layers_of(name):
    """A check of all layers in one type of activations."""

    def check():
        import cupy
        import cupyx

        for layer, shape, values in LAYERS.values():
            host = layer.parameters(np.random.default_rng(0), np, np.float32)
            host = {own: value.astype(drawn(name, 1).dtype) for own, value in host.items()}
            x = np.arange(np.prod(shape)).reshape(shape) % values if values else drawn(name, *shape)
            device, dx = {own: cupy.asarray(v) for own, v in host.items()}, cupy.asarray(x)
            # NumPy rounds to 16 bits after each operation; a kernel rounds its result alone.
            wide = {own: value.astype("f8") for own, value in host.items()}
            exact = x if values else x.astype("f8")
            right = passed(layer, wide, exact, lambda y: drawn(name, *y.shape).astype("f8"))
            ups = cupy.asarray(drawn(name, *right[0].shape))
            with cupyx.allow_synchronize(False):
                found = passed(layer, device, dx, lambda y, ups=ups: ups)
            close(name, found, right)
        return f"{len(LAYERS)} layers, forward and backward, without a wait"

    return check


def passed(layer, parameters, x, gradient):
    """Output and gradients."""
    y, saved = layer.forward(parameters, x)
    dx, kept = layer.backward(parameters, saved, gradient(y))
    gradients = layer.gradients(parameters, kept)
    return [y, dx, *(gradients[own] for own in sorted(gradients))]


def losses():
    import cupy

    scores, numbers = drawn("float32", 6, 11), drawn("float32", 6, 1)
    cases = (
        (CrossEntropy(ALONE, 11, 0.1), scores, np.arange(6)),
        (CrossEntropy(ALONE, 11, ignore_index=3), scores, np.arange(6)),
        (MeanSquaredError(), numbers, numbers[::-1].copy()),
        (BinaryCrossEntropy(), numbers, (numbers[::-1] > 0).astype(np.float32)),
    )
    for loss, outputs, labels in cases:
        found = loss(cupy.asarray(outputs), cupy.asarray(labels), 5.0)
        close("float32", found, loss(outputs, labels, 5.0))
    return f"{len(cases)} losses"


def optimizers():
    import cupy

    cases = (SGD(0.9, 0.1), SGD(0.9, 0.1, True), Adam(), Adam(weight_decay=0.1, decoupled=True),
             LARS(0.9, 0.1), LAMB(weight_decay=0.1))  # fmt: skip
    for optimizer in cases:
        host = [drawn("float32", 1000, seed=n) for n in range(2 + len(optimizer.slots))]
        host[-1] = np.abs(host[-1])
        device = [cupy.asarray(x) for x in host]
        for p, g, *slots in (host, device):
            state = dict(zip(optimizer.slots, slots, strict=True))
            if optimizer.layerwise:
                optimizer.apply(p, optimizer.prepare(p, g, state, 3), state, 0.1)
            else:
                optimizer.take_step(p, g, state, 3, 0.1, 0.5)
        close("float32", device, host)
    return "sgd, nesterov, adam, adamw, lars, lamb"


CHECKS = [
    *(Check(5, f"layers.{name}", layers_of(name)) for name in ("float32", "float16", "bfloat16")),
    Check(5, "layers.losses", losses),
    Check(5, "layers.optimisers", optimizers),
]
