"""The shadow: the first steps in plain torch beside the trainer's layers, on a few samples."""

import logging
import math
import random
import re
import threading
from copy import deepcopy
from functools import partial

import numpy as np
import pytest
import torch
from mpi4py import MPI

import mpitrain
from mpitrain.adapters.torch.functions.objective import TorchLoss
from mpitrain.adapters.torch.functions.optimizer import TorchOptimizer
from mpitrain.adapters.torch.modules import norms
from mpitrain.adapters.torch.modules.layer import TorchLayer
from mpitrain.adapters.torch.shadow import shadow
from mpitrain.config import ConfigError
from mpitrain.data.generators import random_states
from mpitrain.memory import available
from tests.cases import mostly_slow
from tests.mpi.mpitrain.fits import loop, sgd
from tests.zoo.mistakes import KINDS
from tests.zoo.parts import Of, graded, teacher
from tests.zoo.programs import Program

nn, F = torch.nn, torch.nn.functional
X = torch.randn(24, 6, generator=torch.Generator().manual_seed(5))
Y = X.sin().sum(1, keepdim=True)


def between(f, norm=nn.Identity, kind=Of, outputs=1):
    """Makes a module that computes ``f(module, x)`` between two layers."""

    def make():
        parts = {"a": nn.Linear(6, 6), "b": nn.Linear(6, outputs), "norm": norm()}
        return kind(lambda m, x: m.b(f(m, m.a(x).tanh())), **parts)

    return make


def plain():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def autocast():
    return Of(torch.autocast("cpu", torch.bfloat16)(lambda m, x: m.inner(x)), inner=plain())


def fitted(folder, model=plain, loss=F.mse_loss, optimizer=sgd, **given):
    given = {"dtype": "float64", "epochs": 2, "batch_size": 8} | given
    data = given.pop("data", torch.utils.data.TensorDataset(X, Y))
    trainer = mpitrain.Trainer(
        MPI.COMM_SELF, model=model, train_data=data, loss=loss, optimizer=optimizer, seed=3,
        dir=str(folder), log_every=1000, **given,
    )  # fmt: skip
    with trainer:
        trainer.fit()
    return trainer.module


def lines(caplog):
    return [r.getMessage() for r in caplog.records if "run.shadow" in r.getMessage()]


def held(norm):
    """A function that holds on to a module, which is copied for cuts alone."""
    module = Of(
        lambda m, x: m.b(m.norm(m.held(x))), a=nn.Linear(6, 6), norm=norm, b=nn.Linear(6, 1)
    )
    module.held = lambda x: module.a(x)
    return module


class Around(torch.optim.Optimizer):
    """Moves the parameters of another one alone."""

    def __init__(self, base):
        vars(self).update(vars(base), base=base)

    def step(self):
        self.base.step()


def unit(module, x):
    return graded(module, x, lambda module, g: g / g.norm())


def remembering():
    module = plain()
    seen = module[0].weight.detach()
    module[0].register_forward_hook(lambda part, x, y: y + seen.sum())
    return module


OUTPUTS, GRADIENT, UPDATE = "gives samples other outputs", "the gradient of", "the update of"


def of_zoo(kind):
    """A small program with a mistake of tests/zoo."""
    sgd = partial(torch.optim.SGD, lr=0.05)
    parts = [partial(nn.Linear, 6, 6), nn.Tanh, partial(nn.Linear, 6, 1)]
    program = Program(parts, "whole", F.mse_loss, sgd, X, Y, None, {}, 3, [])
    KINDS[kind][0](program)
    return {"model": program.make, "optimizer": program.optimizer}


#: Acts of a program that make a layout train other numbers, and the words that tell of each.
PLANTED = {
    "mixes": (OUTPUTS, lambda: of_zoo("samples mixed forward")),
    "mixes beside batch norm": (OUTPUTS, lambda: {
        "model": between(lambda m, x: m.norm(x) - x.mean(0), lambda: nn.BatchNorm1d(6))}),
    "backward mixes beside batch norm": (GRADIENT, lambda: {
        "model": between(lambda m, x: m.norm(unit(m, x)), lambda: nn.BatchNorm1d(6))}),
    "mixes by draws": (OUTPUTS, lambda: {
        "model": between(lambda m, x: x + x[torch.randperm(len(x))])}),
    "state": (OUTPUTS, lambda: of_zoo("module keeps state")),
    "Python's numbers": ("numbers that are not torch's", lambda: of_zoo("other random numbers")),
    "memory of a parameter": ("step 2: .*" + OUTPUTS, lambda: {"model": remembering}),
    "backward mixes": (GRADIENT, lambda: of_zoo("samples mixed backward")),
    "optimiser mixes": (UPDATE, lambda: of_zoo("optimiser mixes parameters")),
    "optimiser around": (UPDATE, lambda: {
        "optimizer": lambda p: Around(torch.optim.SGD(p, lr=0.1))}),
}  # fmt: skip


@pytest.mark.parametrize("kind", PLANTED)
def test_what_would_train_other_numbers_is_told_in_the_first_steps(tmp_path, kind):
    words, given = PLANTED[kind]
    with pytest.raises(ConfigError, match=rf"(?s)^(?=step \d: ).*({words})"):
        fitted(tmp_path, **({"epochs": 3} | given()))
    # The mistake is the shadow's to find: nothing else stops the run.
    fitted(tmp_path, **({"epochs": 3} | given()), shadow=0)


def test_what_another_check_finds_is_told_in_its_words(tmp_path):
    with pytest.raises(ConfigError, match=r"step 1: part0 follows from a\.\w+ by another way than"):
        fitted(tmp_path, lambda: held(nn.Tanh()).double(), cuts=["norm"])


def normed():
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))


NORMED = {"model": normed}
HALF = {"model": autocast, "dtype": "float32"}
DECAYS = {
    "optimizer": lambda p: torch.optim.AdamW(p, lr=3e-4, weight_decay=0.01), "dtype": "float32"
}  # fmt: skip


@pytest.mark.parametrize(
    ("where", "name", "times", "words", "given"),
    [
        (TorchLayer, "backward", 0.5, "the gradient of 0.weight is 1/2 of torch's: a mean", {}),
        (TorchLayer, "backward", 2, "the gradient of 0.weight is 2 times torch's: a mean", {}),
        (TorchLoss, "_of", 3, "the loss is 3 times torch's", {}),
        (TorchLoss, "_of", float("nan"), "the loss is nan, and .* in torch", {}),
        (TorchOptimizer, "apply", 0.5, "the update of 0.weight is 1/2 of torch's", {}),
        (norms, "follow", 0.5, "the new value of 1.running_mean is 1/2 of torch's", NORMED),
        (TorchLayer, "backward", 0.5, "the gradient of .* torch's", HALF),
        (TorchOptimizer, "made", 0.0, "the update of 0.weight is not torch's", DECAYS),
    ],
)
def test_a_fault_of_the_trainers_own_is_told_by_its_ratio(
    tmp_path, monkeypatch, where, name, times, words, given
):
    usual = getattr(where, name)

    def backward(self, *given):
        dx, kept = usual(self, *given)
        return dx, {key: None if one is None else one * times for key, one in kept.items()}

    def _of(self, *given):
        value, *rest = usual(self, *given)
        return value * times, *rest

    def apply(self, p, direction, state, rate):
        usual(self, p, direction, state, rate * times)

    def follow(state, mean, squares, count, part):
        usual(state, mean, squares, count, part * times)

    def made(self, parameter, rate):
        own = usual(self, parameter, rate)
        own.param_groups[0]["weight_decay"] *= times
        return own

    monkeypatch.setattr(where, name, locals()[name])
    with pytest.raises(ConfigError, match=f"step 1: {words}"):
        fitted(tmp_path, **given)


def keeping(module, x):
    module.kept = x
    return x


def graphed():
    module = between(keeping)()
    module.kept = module.a(torch.ones(6))
    return module


def clamping(module, x):
    """A backward pass that is not linear."""
    return graded(module, x, lambda module, g: g.clamp(-1e-2, 1e-2))


def transposed():
    module = plain()
    module[0].weight = nn.Parameter(torch.ones(6, 8).T)
    return module


def again():
    inner = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3), nn.Tanh())
    checkpoint = partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
    return Of(lambda m, x: checkpoint(m.inner, x), inner=inner)


class Short(torch.autograd.Function):
    """Keeps 16 bits."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.bfloat16())
        return x.square()

    @staticmethod
    def backward(ctx, dy):
        return 2 * dy * ctx.saved_tensors[0].float()


def counted(outputs, labels):
    counts = labels > 0
    return ((outputs - labels).square() * counts).sum(), counts.sum()


class Categories(nn.Module):
    """Takes a number for the number of a row, as in tables of one type."""

    def __init__(self):
        super().__init__()
        self.rows, self.leave = nn.Embedding(4, 3), nn.Linear(8, 1)

    def forward(self, x):
        return self.leave(torch.cat([self.rows(x[:, 0].long()), torch.bernoulli(x[:, 1:])], 1))


def categories():
    x = (torch.arange(24) % 4)[:, None] / torch.tensor([1.0] + 5 * [3.0])
    return torch.utils.data.TensorDataset(x, Y)


def one_cycle(optimizer):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=40)


#: tests/zoo draws others, in both types.
RIGHT = {
    "holds on to itself": {"model": lambda: held(nn.Dropout(0.2))},
    "batch norm beside it": {"model": lambda: held(nn.BatchNorm1d(6))},
    "keeps a graph": {"model": graphed},
    "batch norm in a checkpoint": {"model": between(
        lambda m, x: torch.utils.checkpoint.checkpoint(m.norm, x, use_reentrant=False),
        lambda: nn.BatchNorm1d(6))},
    "old spectral norm": {"model": lambda: nn.Sequential(
        nn.utils.spectral_norm(nn.Linear(6, 8)), nn.Linear(8, 1)), "micro_batches": 2},
    "numbers at edges": {"model": Categories, "data": categories()},
    "checkpoints": {"model": lambda: nn.Sequential(again(), nn.Linear(6, 1))},
    "keeps what it made beside cuts": {"model": between(keeping), "cuts": ["a"]},
    "vmap beside cuts": {"model": between(
        lambda m, x: torch.func.vmap(lambda row: m.norm(row).tanh())(x), lambda: nn.Linear(6, 6)),
        "cuts": ["a"]},
    "by name": {"loss": "mean_squared_error", "optimizer": None, "optim": {"name": "adamw"}},
    "another rate": {"schedule": one_cycle, "optim": {"lr": 0.02}},
    "adafactor": {"optimizer": lambda p: torch.optim.Adafactor(p, lr=0.05)},
    "zero": {"optimizer": lambda p: torch.optim.NAdam(p, lr=0.02), "parallel": {"zero": 2}},
    "bfloat16": {"compute": "bfloat16", "dtype": "float32"},
    "autocast": {"model": autocast},
    "autocast in a checkpoint": {"model": between(
        lambda m, x: torch.utils.checkpoint.checkpoint(
            torch.autocast("cpu", torch.bfloat16)(m.norm), x, use_reentrant=False).float(),
        lambda: nn.Linear(6, 6))},
    "16 bits in a function": {"model": between(lambda m, x: Short.apply(x))},
    "torch.func": {"model": between(
        lambda m, x: x + torch.func.grad(lambda x: m.norm(x).tanh().square().sum())(x),
        lambda: nn.Linear(6, 6))},
    "a transposed parameter": {"model": transposed},
}  # fmt: skip


@pytest.mark.parametrize("kind", mostly_slow(RIGHT, [*RIGHT][::2]))
def test_what_is_right_is_let_be_and_keeps_its_bits(tmp_path, caplog, kind):
    """With the shadow and without, whoever draws numbers beside training."""
    caplog.set_level(logging.INFO, "mpitrain")
    given, found = {"dtype": "float32", "epochs": 3} | RIGHT[kind], []
    for steps in (8, 0):
        torch.manual_seed(1), random.seed(1), np.random.seed(1)
        own = fitted(tmp_path, **given, shadow=steps).state_dict()
        found.append([*own.values(), torch.rand(2), random.random(), np.random.rand()])
    assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(*found))
    (told,) = lines(caplog)
    assert "8 steps are as in plain torch" in told


class OwnLoss(Of):
    def forward(self, x, labels):
        return {"loss": F.cross_entropy(super().forward(x), labels)}


@pytest.mark.parametrize(
    ("f", "norm", "words"),
    [
        (clamping, nn.Identity, "the gradient of .* is not linear where the"),
        (lambda m, x: m.norm(x) - x.mean(0), lambda: nn.BatchNorm1d(6), OUTPUTS),
    ],
    ids=["a clamp under counts that come too late", "samples mixed beside batch norm"],
)
def test_of_a_models_own_loss_it_is_told_as_well(tmp_path, f, norm, words):
    labels = torch.where(torch.arange(24) % 4 == 1, -100, torch.arange(24) % 3)
    data = [{"x": x, "labels": y} for x, y in zip(X, labels)]
    with pytest.raises(ConfigError, match=rf"step 1: .*{words}"):
        fitted(tmp_path, between(f, norm, OwnLoss, 3), "model", data=data)


def no_threes(module, x):
    assert len(x) != 3, "three"
    return x


def test_an_assertion_that_a_number_of_samples_breaks_is_told(tmp_path):
    words = r"step 1: the trainer's layers cannot take 1 and 3 samples \(AssertionError: three"
    with pytest.raises(ConfigError, match=words):
        fitted(tmp_path, between(no_threes))


def test_a_loss_that_goes_backward_itself_is_told(tmp_path):
    def beside(outputs, labels):
        if outputs.requires_grad:
            outputs.square().sum().backward(retain_graph=True)
        return F.mse_loss(outputs, labels)

    for steps in (8, 0):
        with pytest.raises(ConfigError, match=r"step 1: loss: .*beside calls backward\(\) itself"):
            fitted(tmp_path, loss=beside, shadow=steps)


READS = (
    lambda weight: weight.square().sum(),
    lambda weight: torch.cat([weight, weight]).square().sum(),
    lambda weight: torch.sum(input=weight),
)


@pytest.mark.parametrize("steps", [8, 0])
@pytest.mark.parametrize("reads", READS)
def test_a_loss_that_reads_what_the_module_changes_is_told(tmp_path, steps, reads):
    net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), teacher(), nn.Linear(6, 1)).double()
    loss = lambda y, t: F.mse_loss(y, t) + reads(net[2].slow.weight)  # noqa: E731
    with pytest.raises(ConfigError, match=r"step 1: loss: .* reads constants that the module"):
        fitted(tmp_path, net, loss, shadow=steps)


def leaving(module, x):
    """Traces that a trial could leave behind."""
    module.calls = getattr(module, "calls", 0) + 1
    module.frozen.add_(0.1)
    return x * (random.random() + np.random.rand() + torch.rand(1) < 9) + module.frozen


def test_each_item_of_a_loader_without_batches_is_a_step(tmp_path):
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), batch_size=None)
    net = plain()
    own, given = deepcopy(net), {"model": net, "loss": F.mse_loss, "optimizer": sgd, "epochs": 1}
    with mpitrain.Trainer(MPI.COMM_SELF, train_data=data, dir=str(tmp_path), **given) as trainer:
        trainer.fit()
        assert trainer.parts.steps_done == len(data)
    loop(own, sgd, data, lambda module, some: F.mse_loss(module(some[0]), some[1]))
    for one, other in zip(net.parameters(), own.parameters(), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("cuts", [[], ["a"]])
def test_trials_leave_no_trace(tmp_path, cuts):
    module = between(leaving)()
    module.frozen = nn.Parameter(torch.ones(()), requires_grad=False)
    before = random_states()
    given = {"model": module, "cuts": cuts, "loss": F.mse_loss, "optimizer": sgd, "shadow": 0}
    data = torch.utils.data.TensorDataset(X, Y)
    with mpitrain.Trainer(MPI.COMM_SELF, train_data=data, dir=str(tmp_path), **given):
        assert random_states() == before
        assert not hasattr(module, "calls") and module.frozen == 1


class Uncopied(nn.Linear):
    """Keeps what has no copy."""

    def __init__(self):
        super().__init__(6, 1)
        self.lock = threading.Lock()


def some_count(count):
    """A loss over what counts, and data of which the samples count whose number is such a one."""
    y = torch.where(count(torch.arange(24))[:, None], Y.abs() + 1, -1)
    return {"loss": counted, "data": torch.utils.data.DataLoader([*zip(X, y)], 8)}


def step_lr(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 1)


@pytest.mark.filterwarnings("error:Detected call of")
@pytest.mark.parametrize(
    ("level", "given", "words"),
    [
        ("WARNING", {"model": Uncopied}, "is off.* cannot pickle"),
        ("WARNING", {"model": normed, "random": "local"}, "is off.* run.random = 'local'"),
        ("INFO", some_count(lambda n: n > 3) | {"epochs": 3}, "5 steps are as in plain torch"),
        ("WARNING", some_count(lambda n: n % 8 > 3) | {"shadow": 1, "schedule": step_lr},
         ": nothing was compared.* no finite loss"),
    ],
)  # fmt: skip
def test_a_line_says_what_was_not_compared(tmp_path, caplog, level, given, words):
    caplog.set_level(level, "mpitrain")
    fitted(tmp_path, **given)
    (told,) = lines(caplog)
    assert re.match(f"run.shadow.*{words}", told)


def test_a_comparison_that_takes_long_ends_with_a_line(tmp_path, caplog, monkeypatch):
    caplog.set_level(logging.INFO, "mpitrain")
    monkeypatch.setattr(shadow, "_SECONDS", 0.0)
    fitted(tmp_path)
    (told,) = lines(caplog)
    assert told.startswith("run.shadow: 1 step") and told.endswith("the others are left out")


def test_a_step_that_is_left_out_ends_the_comparison(tmp_path, caplog, monkeypatch):
    """Where a clock stands still, as under --virtual --costs."""
    caplog.set_level(logging.INFO, "mpitrain")
    monkeypatch.setattr(shadow, "perf_counter", lambda: 0.0)
    shadows, usual = [], shadow.Shadow.__call__

    def leaves_out(self, parts, batch):
        shadows.append(self)
        self._looks += len(shadows) == 4
        usual(self, parts, batch)

    monkeypatch.setattr(shadow.Shadow, "__call__", leaves_out)
    fitted(tmp_path)
    (told,) = lines(caplog)
    assert "3 steps are as in plain torch" in told and told.endswith("the others are left out")
    assert not hasattr(shadows[0], "_plain")


def test_what_torch_cannot_take_either_is_told_with_the_type(tmp_path):
    loss = nn.CrossEntropyLoss(weight=torch.ones(3))
    data = torch.utils.data.TensorDataset(X, Y[:, 0].long() % 3)
    with pytest.raises(ConfigError, match=r"step 1: torch itself .* in float64 .*weight\.to"):
        fitted(tmp_path, lambda: nn.Linear(6, 3), loss, data=data)


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({}, math.inf),
        ({"proc/meminfo": "MemTotal: 9 kB\nMemAvailable: 4 kB"}, 4096),
        ({"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/memory.max": "50",
          "sys/fs/cgroup/a/b/memory.max": "max", "proc/meminfo": "MemAvailable: 4 kB"}, 50),
        ({"proc/self/cgroup": "3:cpu:/a\n2:memory:/a",
          "sys/fs/cgroup/memory/a/memory.limit_in_bytes": "50"}, 50),
    ],
)  # fmt: skip
def test_free_memory_is_that_of_the_machine_and_of_the_job(tmp_path, files, free):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert available(tmp_path) == free
