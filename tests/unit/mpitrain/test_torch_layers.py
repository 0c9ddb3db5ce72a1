"""Modules of torch are layers of the trainer, or are refused with the way out."""

from collections import namedtuple
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_structure

from mpitrain.adapters.torch import TorchLayer, arrays, layers
from mpitrain.adapters.torch.checks.probe import outputs_of
from mpitrain.fields import Fields
from mpitrain.nn.context import RESTING, Context
from tests.zoo.parts import Of

nn = torch.nn


def functional(f, *buffers):
    """A module that computes ``f(module, x)``."""
    return Of(f, **{name: torch.zeros(6) for name in buffers})


def values_of(layer, dtype=np.float64):
    return layer.parameters(np.random.default_rng(0), np, dtype)


def forward(module, x=None, dtype=np.float64):
    layer = TorchLayer(module, "part3")
    values = values_of(layer, dtype)
    x = np.random.default_rng(0).normal(size=(4, 6)).astype(dtype) if x is None else x
    y, saved = layer.forward(values, x)
    dx, kept = layer.backward(values, saved, np.ones_like(y))
    return layer, y, dx, layer.gradients(values, kept)


def test_a_weight_within_a_graph_is_copied_beside_a_batch_norm():
    """torch refuses to copy what weight_norm keeps, or what a module has kept of a pass."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.utils.weight_norm(nn.Linear(6, 6)), nn.BatchNorm1d(6)).double()
    module.kept = module(torch.ones(4, 6).double())
    x = torch.randn(4, 6).double()
    _, y, _, _ = forward(module, x.numpy())
    np.testing.assert_allclose(y, module.eval()(x).detach().numpy(), rtol=1e-12)


def moving(module, x):
    module.mean = 0.9 * module.mean + 0.1 * x.detach().mean(0)
    return x - module.mean


norm = nn.functional.batch_norm
IMPURE = {
    "counts": (lambda m, x: torch.poisson(x.exp()), r"by torch\.ops\.aten\.poisson; do without"),
    "of no sample": (
        lambda m, x: x * torch.rand(len(x) ** 2)[: len(x), None].to(x),
        r"random numbers of the shape \(4,\) for 2 samples and \(9,\) for 3, of which no axis",
    ),
    "running statistics": (
        lambda m, x: norm(x, m.mean, torch.ones(6).to(x), training=True),
        "has running values that are not those of a BatchNorm around it",
    ),
    "new buffer": (moving, "part3 changes its mean"),
    "buffer in place": (lambda m, x: x + m.mean.mul_(0.9), "part3 changes its mean"),
    "tuple": (lambda m, x: (x, 3), "returns a int"),
}


@pytest.mark.parametrize(("f", "match"), IMPURE.values(), ids=IMPURE)
def test_what_no_class_shows_is_refused_at_the_first_batch(f, match):
    torch.manual_seed(0)
    state, module = torch.get_rng_state(), functional(f, "mean")
    module.train()
    with pytest.raises(ValueError, match=match):
        forward(module)
    assert torch.equal(torch.get_rng_state(), state)
    assert module.training and not module.mean.any()


def test_training_is_in_training_mode_and_tests_in_evaluation_mode(caplog):
    """But for parts that are held; afterwards, the module is in the mode that it was in."""

    def modes():
        parts = dict(held=nn.Identity().eval(), free=nn.Identity())
        return Of(lambda m, x: x + 4 * m.training + 2 * m.held.training + m.free.training, **parts)

    caplog.set_level("INFO", "mpitrain")
    for module in (modes(), modes().eval()):
        layer, x = layers(module)["part0"], np.zeros((2, 1))
        before = [part.training for part in module.modules()]
        assert layer.forward({}, x)[0][0] == 0
        trained = layer.forward({}, x, Context(True, samples=np.arange(2)))[0][0]
        assert trained == (5 if module.training else 7)
        assert [part.training for part in module.modules()] == before
    assert caplog.messages == [
        "model: a Of in eval() is trained in training mode, as after its train()"
    ]


class Frozen(nn.Module):
    """Fine-tuning holds the statistics of a norm, by a train() of its own or in each pass."""

    def __init__(self, where, merges=False):
        super().__init__()
        self.norm, self.where, self.merges = nn.BatchNorm1d(6), where, merges
        self.norm.running_mean.fill_(2.0)

    def train(self, mode=True):
        super().train(mode)
        if self.where == "train":
            self.norm.eval()
        if self.merges:
            self.norm.weight.data.fill_(float(mode))
        return self

    def forward(self, x):
        if self.where == "forward":
            self.norm.eval()
        return self.norm(x)


@pytest.mark.parametrize("where", ["train", "forward"])
def test_batch_norm_that_the_module_itself_holds_has_its_running_values(where):
    layer, x = layers(Frozen(where))["part0"], np.random.default_rng(0).normal(size=(4, 6))
    state = layer.state(np.float64)
    y, _ = layer.forward(values_of(layer), x, Context(True, samples=np.arange(4), state=state))
    np.testing.assert_allclose(y, (x - 2) / np.sqrt(1 + 1e-5), rtol=1e-12)
    assert all((values == 2).all() for name, values in state.items() if "mean" in name)


def hooked():
    """With a hook on the gradient of its weight."""
    module = nn.Linear(6, 6)
    module.weight.register_hook(lambda gradient: 0 * gradient)
    return module


def holding(part):
    return Of(lambda m, x: m.own(x), own=part)


NORM = nn.BatchNorm1d(6)
#: Modules, and what refuses them when layers are made of them.
CANNOT = [
    (hooked(), "weight has a hook on its gradient"),
    (holding(nn.Sequential(hooked(), nn.BatchNorm1d(6))), "has a hook on its gradient"),
    (holding(nn.LazyBatchNorm1d()), "has no shape yet"),
    (nn.LazyLinear(6), "has no shape yet"),
    (torch.jit.script(nn.Linear(6, 6)), "by torch.jit, .* give the module that it was made of"),
    (nn.InstanceNorm1d(6, track_running_stats=True), "use track_running_stats=False"),
    (nn.Sequential(NORM, nn.Linear(6, 6), NORM), r"part4. .BatchNorm1d. is in part2, too"),
    (nn.Embedding(3, 6, scale_grad_by_freq=True), r"set scale_grad_by_freq=False, or train it"),
    (nn.EmbeddingBag(3, 6, sparse=True), r"EmbeddingBag.*are sparse.*; set sparse=False"),
    (nn.Linear(6, 6, device="meta"), "lies on meta"),
    (Frozen("train", merges=True), r"Sequential.train.. changes parameters .*loralib"),
]


@pytest.mark.parametrize(("module", "match"), CANNOT)
def test_what_cannot_be_a_layer_is_refused_when_it_is_made(module, match):
    parts = module if isinstance(module, nn.Sequential) else [module]
    with pytest.raises(ValueError, match=match):
        layers(nn.Sequential(nn.Flatten(), nn.Tanh(), *parts))


Pair = namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    "give",
    [
        lambda y: {"a": {"x": y, "z": None}},
        lambda y: Pair(y, None),
        lambda y: (y, None),
        lambda y: [y, Pair(y, {"x": y})],
    ],
)
def test_outputs_have_the_modules_form_in_losses_and_later_parts(give):
    seen = []
    module = nn.Sequential(
        functional(lambda m, x: give(x)), functional(lambda m, x: seen.append(x) or x)
    )
    first, last = layers(module).values()
    last.output_shape(first.output_shape((6,)))
    wanted = give(torch.ones(2, 6))
    outputs, _ = outputs_of(wanted)
    for found in (seen[-1], last.formed(outputs)):
        assert tree_structure(found) == tree_structure(wanted)


class Clamped(nn.Linear):
    """Changes its weight behind torch's back as soon as a number in it is above the limit."""

    limit = 0.0

    def forward(self, x):
        self.weight.data.clamp_(max=self.limit)
        return super().forward(x)


@pytest.mark.parametrize("late", [False, True])
def test_parameters_that_are_changed_behind_torchs_back(late):
    module = Clamped(6, 6)
    module.limit = 10.0 if late else 0.0
    layer, *_ = forward(module) if late else (layers(nn.Sequential(module))["part0"],)
    values = values_of(layer)
    module.limit = 0.0
    with pytest.raises(ValueError, match="changes its parameters in its forward pass"):
        layer.forward(values, np.ones((4, 6)))


def residual(inner):
    """Around something that computes in the place of its input."""
    return nn.Sequential(nn.Linear(6, 6), Of(lambda m, y: m.inner(y) + y, inner=inner))


def held(part):
    """Frozen statistics, as of fine-tuning; weight and bias are trained."""
    part.running_mean.uniform_(-1, 1)
    part.running_var.uniform_(1, 2)
    return part.eval()


class Doubled(nn.BatchNorm1d):
    def forward(self, x):
        return 2 * super().forward(x)


def adding(part):
    part.register_forward_hook(lambda part, args, y: y + args[0])
    return part


FUNCTIONS = [
    nn.Linear(6, 6),
    nn.Identity(),
    nn.Dropout(0),
    nn.Linear(6, 6).bfloat16(),
    functional(lambda m, x: x + m.table, "table"),
    # They compute in the place of their input.
    nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True)),
    nn.ReLU(inplace=True),
    nn.Hardtanh(inplace=True),
    nn.Dropout(0.5, inplace=True).eval(),
    functional(lambda m, x: x.relu_()),
    functional(lambda m, x: nn.functional.leaky_relu(x.view(-1), inplace=True).view(x.shape)),
    residual(nn.ReLU(inplace=True)),
    residual(functional(lambda m, x: x.mul_(2))),
    # They are held in evaluation mode.
    held(nn.BatchNorm1d(6)),
    held(nn.SyncBatchNorm(6)),
    residual(held(nn.BatchNorm1d(6))),
    held(Doubled(6)),
    held(adding(nn.BatchNorm1d(6))),
    nn.Dropout(0.5).eval(),
]


@pytest.mark.parametrize("module", FUNCTIONS, ids=lambda module: type(module).__name__)
def test_functions_are_layers_and_nothing_is_disturbed(module):
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Sequential(module)).double()
    x = torch.randn(4, 6).double().requires_grad_()
    expected = whole(x * 1)
    expected.square().sum().backward()
    layer, state = layers(whole)["part0"], torch.get_rng_state()
    values, given = values_of(layer), x.detach().numpy()
    kept, own = given.copy(), {name: v.clone() for name, v in whole.state_dict().items()}
    for _ in range(3):
        y, saved = layer.forward(values, given)
        dx, kept_for_later = layer.backward(values, saved, 2 * y)
        np.testing.assert_allclose(y, expected.detach(), rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(dx, x.grad, rtol=1e-11, atol=1e-13)
        assert np.array_equal(given, kept)
    found = layer.gradients(values, kept_for_later)
    assert list(found) == [name for name, _ in whole[0].named_parameters()]
    for name, gradient in found.items():
        wanted = whole[0].get_parameter(name).grad
        np.testing.assert_allclose(gradient, wanted, rtol=1e-11, atol=1e-13)
    assert not layer.state(np.float64)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(v, own[name]) for name, v in whole.state_dict().items())


@pytest.mark.parametrize("momentum", [0.3, None])
def test_batch_norm_is_torchs(momentum):
    """Also that over all ranks; running values are their mean over all passes without momentum."""
    layer = layers(nn.Sequential(nn.SyncBatchNorm(6, momentum=momentum).double()))["part0"]
    own, rng = nn.BatchNorm1d(6, momentum=momentum).double(), np.random.default_rng(0)
    state, values = layer.state("f8"), values_of(layer)
    for _ in range(3):
        x = rng.normal(size=(4, 6))
        y, _ = layer.forward(values, x, Context(True, samples=np.arange(4), state=state))
        np.testing.assert_allclose(y, own(torch.from_numpy(x)).detach())
    for name, found in state.items():
        np.testing.assert_allclose(found, own.get_buffer(name))


@pytest.mark.slow
def test_batch_norm_is_not_compiled_for_each_pass():
    module = Of(lambda m, x: m.norm(x), norm=nn.BatchNorm1d(6)).double()
    layer, frames = layers(module)["part0"], []
    layer.output_shape((6,))
    module.compile(backend="eager")
    state, values = layer.state("f8"), values_of(layer)
    for _ in range(6):
        context = Context(True, samples=np.arange(4), state=state)
        layer.forward(values, np.random.default_rng(0).normal(size=(4, 6)), context)
        frames.append(torch._dynamo.utils.counters["frames"]["total"])
    assert 0 < frames[2] == frames[-1]
    assert state["norm.num_batches_tracked"] == 6


def test_batch_norm_in_torchs_checkpoint_counts_a_batch_once():
    """Also of two micro-batches that are both forward before one is backward."""
    checkpoint = torch.utils.checkpoint.checkpoint
    found = []
    for call in (lambda m, x: m.inner(x), lambda m, x: checkpoint(m.inner, x, use_reentrant=False)):
        torch.manual_seed(0)
        module = functional(call)
        module.inner = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.2)).double()
        layer, x = TorchLayer(module), np.random.default_rng(0).normal(size=(9, 6))
        values, state, passes = values_of(layer), layer.state("f8"), []
        for rows in (slice(4), slice(4, 9)):
            context = Context(True, samples=np.arange(9)[rows], state=state)
            passes.append((x[rows], layer.forward(values, x[rows], context)[1]))
        gradients = [layer.backward(values, saved, np.ones_like(own))[0] for own, saved in passes]
        found.append([*state.values(), *gradients])
    assert state["inner.1.num_batches_tracked"] == 2
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_in_16_bits_rounds_once(training):
    """Its error is at most torch's own, to half of the last bit."""
    kind = pytest.importorskip("ml_dtypes").bfloat16
    torch.manual_seed(0)
    own = nn.BatchNorm1d(6)
    nn.init.normal_(own.weight), nn.init.normal_(own.bias)
    own.running_mean += 2
    x = (3 * torch.randn(64, 6) + 1).bfloat16()
    layer = layers(nn.Sequential(own))["part0"]
    context = Context(training, samples=np.arange(64), state=layer.state("f4"))
    values = {name: part.astype(kind) for name, part in values_of(layer, np.float32).items()}
    y, _ = layer.forward(values, arrays.as_array(x), context)
    assert y.dtype == kind
    exact = own.bfloat16().float().train(training)
    torch.testing.assert_close(arrays.as_tensor(y).float(), exact(x.float()), rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("own", [nn.Identity, lambda: nn.Dropout(0.5), lambda: nn.BatchNorm1d(3)])
def test_no_samples_of_a_module_that_takes_no_empty_batch(own):
    class Views(nn.Sequential):
        def forward(self, x):
            return super().forward(x.view(x.size(0), 3, -1)).view(x.size(0), -1)

    layer = TorchLayer(Views(nn.Linear(2, 4), own()))
    values = values_of(layer, np.float32)
    state = layer.state(np.float32)
    where = Context(True, samples=np.arange(0), state=state) if layer.sees else RESTING
    for dtype in (np.float32, np.float64):
        x = np.empty((0, 6), dtype)
        y, saved = layer.forward({n: v.astype(dtype) for n, v in values.items()}, x, where)
        dx, kept = layer.backward(values, saved, y)
        assert (y.shape, y.dtype) == ((0, 12), dtype)
        assert (dx.shape, dx.dtype) == ((0, 6), dtype)
        assert not any(layer.gradients(values, kept).values())
    np.testing.assert_equal(state, layer.state(np.float32))


def test_no_samples_of_several_inputs():
    """One of which must be above 0, as lengths are."""

    class Packs(nn.Module):
        def forward(self, x, lengths):
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, True, enforce_sorted=False)
            back, _ = nn.utils.rnn.pad_packed_sequence(packed, True, total_length=x.shape[1])
            return {"y": back, "lengths": lengths}

    layer = TorchLayer(Packs())
    kind = np.dtype([("x", np.float32, (4, 2)), ("lengths", np.int64)])
    outputs = layer.output_shape(Fields(kind))
    y, saved = layer.forward({}, np.empty(0, kind))
    dx, _ = layer.backward({}, saved, y)
    assert y.shape == dx.shape == (0,)
    assert y.dtype == outputs.dtype and dx.dtype == kind


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (functional(lambda m, x: torch.fft.fft(x)), "of torch.complex64, and layers pass real"),
        (nn.LSTM(6, 4), r"returns a tuple; .* return self.lstm\(x\)\[0\]"),
    ],
)
def test_outputs_that_are_no_real_tensors_are_refused(module, why):
    with pytest.raises(ValueError, match=why):
        layers(module)["part0"].output_shape((5, 6))


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
def test_hooks_of_a_sequential_that_is_taken_apart(kind):
    module = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
    getattr(module, f"register_{kind}_hook")(lambda *given: None)
    with pytest.raises(ValueError, match="its own hooks belong to no part of it; register them on"):
        layers(module)
    assert layers(nn.Sequential(module))


def test_parameters_that_are_frozen_or_unfrozen_later():
    """Also of one that was copied because of what is in it."""
    module = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout())
    module[0].bias.requires_grad_(False)
    layer, *_ = forward(module)
    values = values_of(layer)
    module.requires_grad_(True)
    with pytest.raises(ValueError, match=r"part3: 0\.bias was frozen or unfrozen after"):
        layer.forward(values, np.ones((4, 6)))
    module.requires_grad_(False)
    with pytest.raises(ValueError, match=r"part3: 0\.weight was frozen or unfrozen after"):
        layer.forward(values, np.ones((4, 6)))


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.Linear(6, 5), (4, 6)),
        (nn.ReLU(inplace=True), (4, 6)),
        (nn.Flatten(), (4, 3, 2)),
        (nn.LayerNorm(6), (4, 6)),
        (nn.MaxPool2d(2, return_indices=True), (4, 1, 4, 4)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_passes_of_torchs_own_modules_that_are_watched_no_more(module, shape):
    """The first pass of a module is watched; later ones have the same bits."""
    layer = TorchLayer(module, "part3")
    values, x = values_of(layer), np.random.default_rng(0).normal(size=shape)
    context = Context(training=True, path=("part3",))
    found = []
    for leading in [frozenset[str](), frozenset[str](), frozenset({"part3"})]:
        given = x.copy()
        y, saved = layer.forward(values, given, replace(context, leading=leading))
        dx, kept = layer.backward(values, saved, np.ones_like(y))
        every = {"x": given, "y": y, "dx": dx, **layer.gradients(values, kept)}
        found.append({name: one.tobytes() for name, one in every.items()})
    assert found[0] == found[1] == found[2] | {"dx": found[0]["dx"]}
    if x.ndim < 4:
        assert not np.frombuffer(found[2]["dx"]).any(), "nobody takes a gradient by the data"


@pytest.mark.parametrize("change", ["frozen", "max_norm", "hook", "forward"])
def test_a_module_that_is_changed_when_it_is_watched_no_more(change):
    module = nn.Embedding(3, 6) if change == "max_norm" else nn.Linear(6, 6)
    x = np.arange(3) if change == "max_norm" else np.ones((3, 6))
    layer, called = TorchLayer(module, "part3"), []
    values = values_of(layer)
    for _ in range(3):
        y, _ = layer.forward(values, x)
    why = ""
    match change:
        case "frozen":
            module.weight.requires_grad_(False)
            why = r"part3: weight was frozen or unfrozen after"
        case "max_norm":
            module.max_norm, why = 0.1, r"part3 changes its parameters in its forward pass"
        case "hook":
            module.register_forward_hook(lambda *given: called.append(given) or 2 * given[2])
        case "forward":
            module.forward = lambda x: called.append(x) or 2 * nn.Linear.forward(module, x)
    with pytest.raises(ValueError, match=why) if why else nullcontext():
        np.testing.assert_array_equal(layer.forward(values, x)[0], 2 * y)
    assert bool(called) == (not why)


@pytest.mark.parametrize(("queue", "wanted"), [(0, "default"), (5, "external 5"), (7, None)])
def test_torch_queues_its_work_where_cupy_does(monkeypatch, queue, wanted):
    taken = []
    cupy = SimpleNamespace(cuda=SimpleNamespace())
    cupy.cuda.get_current_stream = lambda: SimpleNamespace(ptr=queue)
    monkeypatch.setattr(arrays, "array_namespace", lambda array: cupy)
    for name, value in {
        "is_available": lambda: True,
        "current_stream": lambda: SimpleNamespace(cuda_stream=7),
        "default_stream": lambda: "default",
        "ExternalStream": lambda ptr: f"external {ptr}",
        "stream": lambda stream: nullcontext(taken.append(stream)),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    with arrays.on_stream_of(None):
        assert taken == ([] if wanted is None else [wanted])
