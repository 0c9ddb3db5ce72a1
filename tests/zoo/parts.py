"""Parts of drawn modules: each takes and gives (B, 6), (B, T, 6) or images (B, 6, h, w)."""

from copy import deepcopy

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

H = 6


class Of(nn.Module):
    """Computes ``f(self, x)`` with the modules, parameters and buffers that it has by name."""

    def __init__(self, f, **has):
        super().__init__()
        self.f = f
        for name, one in has.items():
            is_buffer = isinstance(one, torch.Tensor) and not isinstance(one, nn.Parameter)
            (self.register_buffer if is_buffer else self.__setattr__)(name, one)

    def forward(self, x):
        return self.f(self, x)


class Backward(torch.autograd.Function):
    """Gives ``x`` to the one side, and ``f`` of the gradient to the other."""

    @staticmethod
    def forward(ctx, x, f):
        ctx.f = f
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return ctx.f(g), None


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx, g):
        s = ctx.saved_tensors[0].sigmoid()
        return g * (s + ctx.saved_tensors[0] * s * (1 - s))


def linear(out=H):
    return nn.Linear(H, out)


def with_a(f, **has):
    """Function that makes a part which computes ``f(module, x)`` with a linear layer ``a``."""
    return lambda: Of(f, a=linear(), **{name: make() for name, make in has.items()})


def hooked():
    part = linear()
    part.register_forward_hook(lambda module, x, y: y.tanh() + x[0])
    part.register_forward_pre_hook(lambda module, x: (0.5 * x[0],))
    return part


def graded(module, x, f):
    """``x`` whose gradient a hook gives to ``f(module, gradient)``."""
    y = x * 1
    if y.requires_grad:
        y.register_hook(lambda g: f(module, g))
    return y


def teacher():
    fast = linear()
    return Of(follows, fast=fast, slow=deepcopy(fast).requires_grad_(False))


def follows(module, x):
    if module.training:
        with torch.no_grad():
            module.slow.weight.lerp_(module.fast.weight, 0.1)
    return module.fast(x).tanh() + module.slow(x)


def tied():
    first, second = linear(), linear()
    second.weight = first.weight
    return nn.Sequential(first, nn.Tanh(), second)


def keeps(module, x):
    module.kept, module.mean = x, float(x.detach().mean())
    return module.a(x).tanh()


def solves(module, x, z=0):
    for _ in range(4):
        z = torch.tanh(0.3 * module.a(z + x) + x)
    return z


def slope(x, f):
    """The gradient of ``f`` by the input, within the module."""
    with torch.enable_grad():
        own = x if x.requires_grad else x.detach().requires_grad_()
        return torch.autograd.grad(f(own), own, create_graph=True)[0]


def routes(module, x):
    """Each sample has one expert."""
    gates = module.gate(x).softmax(-1)
    best = gates.argmax(-1, keepdim=True)
    both = torch.stack([module.a(x), module.b(x).tanh()], -1)
    chosen = both.gather(-1, best[..., None].expand(*x.shape, 1)).squeeze(-1)
    return x + chosen * gates.gather(-1, best)


def looks(module, x):
    """Attention by hand, causal."""
    return x + F.scaled_dot_product_attention(*module.qkv(x).chunk(3, -1), is_causal=True)


def across(norm):
    """A norm or a convolution that wants the channels second."""
    return lambda: Of(lambda m, x: m.norm(x.mT).mT, norm=norm())


def first(kind, **options):
    return lambda: Of(lambda m, x: m.rnn(x)[0], rnn=kind(H, H, batch_first=True, **options))


def attends(m, x):
    return x + m.inner(x, x, x, need_weights=False)[0]


#: Parts of all forms whose last axis has the features.
ANY = {
    "linear": with_a(lambda m, x: m.a(x).tanh()),
    "mlp": lambda: nn.Sequential(linear(8), nn.ReLU(), nn.Linear(8, H, bias=False), nn.GELU()),
    "layer norm": lambda: nn.LayerNorm(H),
    "rms norm": lambda: nn.RMSNorm(H),
    "branches": with_a(lambda m, x: m.a(x).tanh() + m.b(x).sigmoid() * x, b=linear),
    "glu": lambda: nn.Sequential(linear(2 * H), nn.GLU()),
    "bilinear": lambda: Of(lambda m, x: m.a(x, x.tanh()), a=nn.Bilinear(H, H, H)),
    "tied": with_a(lambda m, x: F.linear(m.a(x).tanh(), m.a.weight.T)),
    "tied modules": tied,
    "weight norm": lambda: parametrizations.weight_norm(linear()),
    "spectral norm": lambda: parametrizations.spectral_norm(linear()),
    "frozen": with_a(lambda m, x: m.a(x) + m.b(x), b=lambda: linear().requires_grad_(False)),
    "constant": lambda: Of(lambda m, x: x * m.scale, scale=torch.linspace(0.5, 1.5, H)),
    "straight through": with_a(lambda m, x: m.a(x) + ((8 * x).round() / 8 - x).detach()),
    "own backward": with_a(lambda m, x: Swish.apply(m.a(x))),
    "forward hooks": hooked,
    "gradient halved": with_a(lambda m, x: graded(m, m.a(x), lambda m, g: g / 2)),
    "gradient clamped": with_a(lambda m, x: graded(m, m.a(x), lambda m, g: g.clamp(-1e-3, 1e-3))),
    "checkpoint": with_a(lambda m, x: checkpoint(m.b, m.a(x), use_reentrant=False), b=tied),
    "vmap": with_a(lambda m, x: torch.func.vmap(lambda row: m.a(row).tanh())(x)),
    "slope": with_a(lambda m, x: slope(x, lambda own: m.a(own).tanh().square().sum()) + x),
    "fixed point": with_a(solves),
    "unit rows": lambda: Of(lambda m, x: x / (1e-3 + x.norm(dim=-1, keepdim=True))),
    "teacher": teacher,
    "keeps": with_a(keeps),
    "experts": with_a(routes, b=linear, gate=lambda: linear(2)),
    "in place": with_a(lambda m, x: m.a(x).mul_(0.5).relu_() + x),
    "no gradient": with_a(lambda m, x: x * m.a(x).detach().softmax(-1) + m.a(x)),
    "waves": with_a(lambda m, x: torch.fft.fft(m.a(x)).real),
    "sorted": with_a(lambda m, x: m.a(x).sort(-1).values.cumsum(-1)),
    "scaled": with_a(lambda m, x: m.a(x) * m.a.weight.norm()),
    "dropout": lambda: nn.Sequential(linear(), nn.Dropout(0.2)),
}
FLAT = ANY | {
    "batch norm": lambda: nn.BatchNorm1d(H),
    "batch norm, mean": lambda: nn.Sequential(linear(), nn.BatchNorm1d(H, momentum=None)),
    "group norm": lambda: nn.GroupNorm(2, H),
    "held norm": lambda: nn.Sequential(linear(), nn.BatchNorm1d(H).eval()),
}
ROWS = ANY | {
    "lstm": lambda: nn.Sequential(first(nn.LSTM, bidirectional=True)(), nn.Linear(12, H)),
    "gru": first(nn.GRU),
    "rnn": first(nn.RNN, num_layers=2),
    "attention": lambda: Of(attends, inner=nn.MultiheadAttention(H, 2, batch_first=True)),
    "causal": lambda: Of(looks, qkv=linear(3 * H)),
    "encoder": lambda: nn.TransformerEncoderLayer(H, 2, 8, dropout=0.0, batch_first=True),
    "convolution": across(lambda: nn.Conv1d(H, H, 3, padding=1)),
    "batch norm": across(lambda: nn.BatchNorm1d(H)),
    "group norm": across(lambda: nn.GroupNorm(3, H)),
    "places": lambda: Of(lambda m, x: x + m.p[: x.shape[1]], p=nn.Parameter(torch.ones(8, H))),
}
IMAGES = {
    "convolution": lambda: nn.Sequential(nn.Conv2d(H, H, 3, padding=1), nn.Tanh()),
    "depthwise": lambda: nn.Conv2d(H, H, 3, padding=1, groups=H),
    "wide": lambda: nn.Conv2d(H, H, 3, padding=2, dilation=2, padding_mode="circular"),
    "residual": lambda: Of(lambda m, x: x + m.a(x).relu(), a=nn.Conv2d(H, H, 1)),
    "group norm": lambda: nn.GroupNorm(2, H),
    "instance norm": lambda: nn.InstanceNorm2d(H, affine=True),
    "batch norm": lambda: nn.BatchNorm2d(H),
    "pool": lambda: nn.Sequential(nn.MaxPool2d(2), nn.LocalResponseNorm(3), nn.Upsample(None, 2)),
    "transposed": lambda: nn.Sequential(nn.ConvTranspose2d(H, H, 2, 2), nn.AvgPool2d(2), nn.SiLU()),
    "squeeze": lambda: Of(lambda m, x: x * m.a(x.mean((2, 3), True)), a=nn.Conv2d(H, H, 1)),
    "dropout": lambda: nn.Dropout2d(0.2),
}
PARTS = {"flat": FLAT, "rows": ROWS, "images": IMAGES}
