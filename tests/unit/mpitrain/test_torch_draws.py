"""Random numbers of torch modules depend on seed, step, place, sample and position alone."""

from copy import deepcopy
from dataclasses import replace
from math import sqrt

import numpy as np
import pytest
import torch

from mpitrain.adapters.torch import TorchLayer
from mpitrain.adapters.torch.modules.drawing import Drawing
from mpitrain.adapters.torch.modules.draws import Draws
from mpitrain.nn.context import Context
from tests.zoo.parts import Backward, graded

nn, functional = torch.nn, torch.nn.functional
CONTEXT = Context(True, seed=5, step=3, samples=np.array([7, 3, 9, 4, 1]))


class Calls(nn.Module):
    """Computes ``f(x, *parts)``."""

    def __init__(self, f, *parts):
        super().__init__()
        self.f, self.parts = f, nn.ModuleList(parts)

    def forward(self, x):
        return self.f(x, *self.parts)


def attends(x, attention):
    return attention(x, x, x)[0]


def in_turn(f):
    return lambda x, *parts: f(x.transpose(0, 1), *parts).transpose(0, 1)


def flat(x):
    """Drops out where samples lie in turn within one axis, as after a transposition."""
    return functional.dropout(x.flatten(0, 1), 0.3).view(x.shape)


def both(x, attention):
    """Heads of a sample lie together, and rows of a sample in turn."""
    return flat(attends(x, attention))


def skips(x, part):
    return x if torch.rand([]) < 0.5 else functional.dropout(part(x), 0.2)


def picks(x):
    return x.gather(2, torch.multinomial(x.exp().flatten(0, 1), 2).view(len(x), 5, 2))


def first(x, part):
    return part(x)[0]


def lstm(**options):
    return nn.LSTM(8, 8, 3, dropout=0.3, **options)


torch.manual_seed(0)  # all ranks that train them have the same values
KINDS = {
    "dropout": nn.Dropout(0.3),
    "twice": Calls(lambda x, part: part(x) - part(x), nn.Dropout(0.3)),
    "in place": nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3, inplace=True)),
    "channels": nn.Dropout1d(0.3),
    "attention": Calls(attends, nn.MultiheadAttention(8, 2, dropout=0.2, batch_first=True)),
    "attention in turn": Calls(in_turn(attends), nn.MultiheadAttention(8, 2, dropout=0.2)),
    "encoder": nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2),
    "lstm": Calls(first, lstm(batch_first=True)),
    "lstm in turn": Calls(in_turn(first), lstm()),
    "in turn in one axis": Calls(in_turn(flat)),
    "together and in turn": Calls(in_turn(both), nn.MultiheadAttention(8, 2, dropout=0.2)),
    "alpha": nn.AlphaDropout(0.3),
    "slopes": nn.RReLU(),
    "pool": nn.Sequential(nn.Unflatten(1, (1, 5)), nn.FractionalMaxPool2d(2, 3)),
    "depth": Calls(lambda x: x * x.new_empty(len(x), 1, 1).bernoulli_(0.5)),
    "tensor of p": Calls(lambda x: x * torch.bernoulli(torch.full_like(x, 0.5))),
    "normal": Calls(lambda x: x + torch.randn_like(x)),
    "normal of tensors": Calls(lambda x: torch.normal(x, x.abs())),
    "own generator": Calls(lambda x: x + torch.rand(x.shape, generator=torch.Generator())),
    "gumbel": Calls(functional.gumbel_softmax),
    "whole numbers": Calls(lambda x: x * torch.randint(2, 9, x.shape)),
    "choices": Calls(picks),
    "distributions": Calls(lambda x: x + torch.distributions.Cauchy(x, 1.0).rsample()),
    "for all": Calls(lambda x: x + torch.randn(5, 8)),
    "layer drop": Calls(skips, nn.Linear(8, 8)),
    "dot product": Calls(lambda x: functional.scaled_dot_product_attention(x, x, x, dropout_p=0.2)),
    "unless empty": Calls(lambda x: x + torch.randn_like(x) if x.any() else x),
    "without autograd": Calls(torch.inference_mode()(lambda x: functional.dropout(x, 0.3))),
    "lstm without autograd": Calls(torch.inference_mode()(first), lstm(batch_first=True)),
}


def passed(layer, values, x, context=CONTEXT):
    """Results, and gradients by the input."""
    y, saved = layer.forward(values, x, context)
    return y, layer.backward(values, saved, np.ones_like(y))[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_has_its_own_numbers_wherever_it_is(kind):
    torch.manual_seed(0)
    state = torch.get_rng_state()
    layer = TorchLayer(KINDS[kind].double())
    assert layer.output_shape((5, 8))
    values = layer.parameters(np.random.default_rng(0), np, np.float64)
    x = np.random.default_rng(0).normal(size=(5, 5, 8))
    # A rank without samples, as at the end of an epoch, tries the module within its first pass.
    passed(layer, values, x[:0], replace(CONTEXT, samples=CONTEXT.samples[:0]))
    whole = passed(layer, values, x)
    for rows in ([4], [1, 2], [3, 0, 2], [0, 1, 2, 3, 4]):
        some = replace(CONTEXT, samples=CONTEXT.samples[rows], again=True)
        for found, wanted in zip(passed(layer, values, x[rows], some), whole, strict=True):
            np.testing.assert_allclose(found, wanted[rows], rtol=1e-12, atol=1e-14)
    others = [replace(CONTEXT, step=step) for step in range(4, 14)]
    others += [replace(CONTEXT, seed=6), replace(CONTEXT, path=("other",))]
    found = [passed(layer, values, x, other)[0] for other in others]
    assert any(not np.array_equal(one, whole[0]) for one in found)
    if kind not in ("depth", "layer drop", "pool"):  # few results are possible
        assert not any(np.array_equal(one, whole[0]) for one in found)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("kind", ["attention", "in turn in one axis", "together and in turn"])
def test_a_first_batch_with_zeros_does_not_hide_whose_numbers_are_whose(kind):
    layer = TorchLayer(deepcopy(KINDS[kind]).double())
    values = layer.parameters(np.random.default_rng(0), np, np.float64)
    x = np.random.default_rng(0).normal(size=(5, 5, 8))
    zeros = x * (np.arange(5) == 2)[:, None, None]
    layer.forward(values, zeros, CONTEXT)
    whole = passed(layer, values, x)
    one = replace(CONTEXT, samples=CONTEXT.samples[[3]], again=True)
    for found, wanted in zip(passed(layer, values, x[[3]], one), whole, strict=True):
        np.testing.assert_allclose(found, wanted[[3]], rtol=1e-12, atol=1e-14)


def test_padding_changes_no_number():
    """Padding of queries, keys and heads, along any axis."""
    long, short = (CONTEXT.uniform(shape) for shape in ((3, 7, 9), (3, 5, 6)))
    np.testing.assert_array_equal(long[:, :, :5, :6], short)
    assert len(np.unique(long)) == long.size


#: Probabilities of 0, 1 and 2.
EITHER = torch.tensor([0.5, 0, 0.5])
DRAWN = {
    "either": (lambda x: x.bernoulli_(0.3), 0.3, sqrt(0.3 * 0.7)),
    "normal": (lambda x: x.normal_(2.0, 3.0), 2.0, 3.0),
    "uniform": (lambda x: x.uniform_(-1.0, 3.0), 1.0, 4 / sqrt(12)),
    "exponential": (lambda x: x.exponential_(2.0), 0.5, 0.5),
    "geometric": (lambda x: x.geometric_(0.25), 4.0, sqrt(0.75) / 0.25),
    "whole": (lambda x: x.random_(0, 10), 4.5, sqrt(99 / 12)),
    "any whole": (lambda x: x.random_(), 2**52, 2**53 / sqrt(12)),
    "any more": (lambda x: x.int().random_(2**30, None), 1.5 * 2**30, 2**30 / sqrt(12)),
    "log normal": (lambda x: x.log_normal_(0.0, 0.5).log_(), 0.0, 0.5),
    "choices": (lambda x: torch.multinomial(EITHER.expand(len(x), 3), 1), 1, 1),
    "several": (lambda x: torch.multinomial(EITHER, len(x), replacement=True), 1, 1),
}


@pytest.mark.parametrize("kind", DRAWN)
def test_mean_and_deviation(kind):
    draw, mean, deviation = DRAWN[kind]
    module, count = nn.Identity(), 20_000
    with Drawing(Draws(module), CONTEXT, np, ()) as drawing:
        found = draw(torch.empty(count, dtype=torch.float64)).double()
    assert not drawing.fault and len(found.unique()) > 1
    assert found.mean().item() == pytest.approx(mean, abs=5 * deviation / sqrt(count))
    assert found.std().item() == pytest.approx(deviation, rel=0.05)


def test_a_kernel_that_draws_inside_has_its_plain_form_instead():
    """Flash attention and cuDNN's LSTM, of which only the names are known without a GPU."""
    draws = Draws(nn.Identity())
    x = torch.zeros(1, 1, 8, 8, device="meta")
    flash = torch.ops.aten._scaled_dot_product_flash_attention.default
    with Drawing(draws, CONTEXT, np, ()) as drawing:
        flash(x, x, x, 0.0)
        assert not draws.plain
        flash(x, x, x, 0.1)
    assert draws.plain and not drawing.fault  # a trial, which is made once more
    kinds = torch.backends.cuda
    with Drawing(draws, CONTEXT, np, (), lambda: None) as drawing:
        assert kinds.math_sdp_enabled() and not kinds.flash_sdp_enabled()
        assert not torch.backends.cudnn.enabled
        flash(x, x, x, 0.1)
    assert "within the kernel _scaled_dot_product_flash_attention" in drawing.fault
    assert kinds.flash_sdp_enabled() and torch.backends.cudnn.enabled


def checkpointed(**options):
    def f(x, one, two):
        for part in (one, two, one):
            x = torch.utils.checkpoint.checkpoint(part, x, **({"use_reentrant": False} | options))
        return x

    return f


def encoders():
    torch.manual_seed(0)
    return [nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).double() for _ in range(2)]


def gradients(module):
    """Gradients of two passes, both forward before one is backward, with other parameters."""
    layer = TorchLayer(module)
    values = layer.parameters(np.random.default_rng(0), np, np.float64)
    values = {name: 1.1 * value for name, value in values.items()}
    x = np.random.default_rng(0).normal(size=(5, 5, 8))
    saved = [layer.forward(values, x, replace(CONTEXT, step=step))[1] for step in range(2)]
    found = []
    for one in saved:
        dx, kept = layer.backward(values, one, np.ones_like(x))
        found += [dx, *layer.gradients(values, kept).values()]
    return found


class Recomputed(torch.autograd.Function):
    """A part of a module, which its backward pass computes again without torch's checkpoints."""

    @staticmethod
    def forward(ctx, part, x, *parameters):
        ctx.part, ctx.state = part, torch.get_rng_state()
        ctx.save_for_backward(x, *parameters)
        return part(x)

    @staticmethod
    def backward(ctx, dy):
        x, *parameters = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.set_rng_state(ctx.state)
            y = ctx.part(x)
        return None, *torch.autograd.grad(y, [x, *parameters], dy)


def recomputed(part, x):
    return Recomputed.apply(part, x, *part.parameters())


def sloped(call):
    """A part, and the slopes of its results, as of a penalty on gradients."""

    def f(x, one, two):
        with torch.enable_grad():
            own = x if x.requires_grad else x.detach().requires_grad_()
            (slopes,) = torch.autograd.grad(call(one, own).sum(), own, create_graph=True)
        return two(x) + slopes

    return f


def once_more(part, x):
    return torch.utils.checkpoint.checkpoint(part, x, use_reentrant=False)


def drops():
    return [nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.Tanh()).double() for _ in range(2)]


@pytest.mark.parametrize(
    ("code", "again", "make"),
    [
        (lambda x, one, two: one(two(one(x))), checkpointed(), encoders),
        (lambda x, one, two: two(one(x)), lambda x, one, two: recomputed(two, recomputed(one, x)),
         drops),
        (sloped(lambda part, x: part(x)), sloped(once_more), drops),
    ],
)  # fmt: skip
def test_what_is_computed_again_repeats_the_numbers(code, again, make):
    """By checkpoints, also of a part that is called twice, the later call of which is repeated
    first; by a function's own backward pass; and for a gradient within the forward pass."""
    parts = make()
    wanted, found = (gradients(Calls(f, *parts)) for f in (code, again))
    assert len(wanted) > 9 and all(one is not None for one in wanted)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one, other)


def noisy(y):
    return y + torch.randn_like(y)


@pytest.mark.parametrize(
    "code", [lambda x: Backward.apply(x, noisy), lambda x: graded(None, x, lambda _, g: noisy(g))]
)
@pytest.mark.parametrize("usual", [functional.dropout, torch.clone])
def test_numbers_of_the_backward_pass_alone_are_refused_whenever_it_draws(code, usual):
    layer = TorchLayer(Calls(lambda x: code(x) if x[0, 0] > 5 else usual(x)))
    x = np.zeros((5, 8))
    layer.forward({}, x, CONTEXT)
    x[0, 0] = 6
    with pytest.raises(ValueError, match=r"backward pass (alone|draws random numbers that its fo)"):
        layer.backward({}, layer.forward({}, x, CONTEXT)[1], x)


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("kind", ["hook", "forward"])
def test_own_code_around_a_class_of_torch_is_keyed(kind, later):
    module = nn.Linear(8, 8)
    usual, draws = module.forward, [not later]

    def drawn(y):
        return noisy(y) if draws[0] else y

    if kind == "hook":
        module.register_forward_hook(lambda part, given, y: drawn(y))
    else:
        module.forward = lambda x: drawn(usual(x))
    layer, x = TorchLayer(module), np.ones((5, 8))
    values = layer.parameters(np.random.default_rng(0), np, np.float64)
    layer.forward(values, x, CONTEXT)
    draws[0] = True  # perhaps later than any trial
    one, _ = layer.forward(values, x, CONTEXT)
    np.testing.assert_array_equal(layer.forward(values, x, CONTEXT)[0], one)  # keyed by the sample
    assert not np.array_equal(layer.forward(values, x, replace(CONTEXT, step=4))[0], one)


def test_a_checkpoint_that_does_not_keep_torchs_generator_is_refused():
    with pytest.raises(ValueError, match="of torch's generator; leave out preserve_rng_state"):
        gradients(Calls(checkpointed(preserve_rng_state=False), *encoders()))
