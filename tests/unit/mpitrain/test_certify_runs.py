"""Notes of ``mpitrain certify`` on runs, in one process."""

import gc
from weakref import ref

import numpy as np
import pytest
import torch
from mpi4py import MPI

from mpitrain import trainer
from mpitrain.__main__ import main
from mpitrain.adapters.torch.modules import norms
from mpitrain.certify.certificate import Certifier, _Reference
from mpitrain.certify.loops import install
from mpitrain.certify.record import HERE, MUTATIONS, Session
from mpitrain.certify.scripts import watched
from mpitrain.certify.watch import TorchWatch

nn, F = torch.nn, torch.nn.functional


@pytest.fixture(autouse=True)
def quick_collections():
    """Each run collects garbage, for which it need not look through all that is imported."""
    gc.freeze()
    yield
    gc.unfreeze()


class Noisy(nn.Linear):
    def forward(self, x):
        return super().forward(x) * np.random.rand()


@pytest.mark.parametrize(
    ("module", "loss", "who"),
    [
        (nn.Linear(3, 1), torch.sum, ""),
        (nn.Linear(3, 1), lambda y: F.dropout(y).sum(), "the loss"),
        (Noisy(3, 1), torch.sum, "Noisy"),
    ],
)
def test_random_numbers_of_a_script_have_a_name(module, loss, who):
    session = Session(1, {}, is_double=False)
    watch = TorchWatch(session)
    for _ in range(2):
        y = watch.call(type(module).__call__, module, torch.ones(4, 3))
        watch.backward(torch.autograd.backward, loss(y))
        torch.rand(1)  # as a loader does
    assert session.record.draws == who


def certifier(folder, program, last=4, *, sees_torch=True):
    return Certifier(MPI.COMM_WORLD, program, str(folder), last, sees_torch=sees_torch)


def certified(*asked, **how):
    """The verdict on a program whose layout is one process, too."""
    found = certifier(*asked, **how)
    told = found.refer()
    return told if told.verdict != "PASS" else found.certify({})


def trains(call, parameters, change=None, optimizer=None, kind=None):
    """A loop of torch, in whose layout something changes the gradients."""
    x = torch.randn(32, 8, generator=torch.Generator().manual_seed(1)).to(kind)
    own = [*parameters]
    optimizer = optimizer or torch.optim.Adam(own, lr=1e-2)
    for rows in x.chunk(4):
        optimizer.zero_grad()
        F.mse_loss(call(rows), rows.sin().sum(1, keepdim=True)).backward()
        for one in own if change and HERE.session.save_at else ():
            change(one)
        if change is kept:
            KEPT.setdefault("clip", torch.nn.utils.clip_grad_norm_)(own, 1e-2)
        optimizer.step()


KEPT = {}  # as a helper module keeps what it imports


def times(factor):
    return lambda one: one.grad.mul_(factor)


twice, kept, nearly = times(2), times(2), times(1 + 1e-8)


def mlp():
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def of(make, change=None, call=None, kind=None):
    def program():
        net = make()
        trains(net if call is None else lambda x: call(net, x), net.parameters(), change, kind=kind)

    return program


def in_rows():
    image = nn.Unflatten(1, (2, 2, 2))
    net = nn.Sequential(image, nn.Conv2d(2, 3, 2), nn.Flatten(), nn.Linear(3, 1))
    net.places = nn.Parameter(torch.arange(3), requires_grad=False)
    return net.to(memory_format=torch.channels_last)


def raw():
    w = nn.Parameter(torch.randn(1, 8))
    torch.autograd.grad(outputs=w.sum(), inputs=w)
    trains(lambda x: F.linear(x, w), [w], twice)


def forgets_decay():
    net, decay = mlp(), 0.0 if HERE.session.save_at else 0.01
    optimizer = torch.optim.AdamW(net.parameters(), 5e-5, weight_decay=decay)
    trains(net, net.parameters(), optimizer=optimizer)


def three():
    a, b, c = net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1))
    trains(lambda x: c(b(a(x))) + c(a(x).detach()), net.parameters())


def normed():
    return nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def half_followed(net, x):
    y = net(x)
    if HERE.session.save_at:
        net[1].running_mean.data.mul_(0.5)
    return y


def in_single(net, x):
    return net[2](net[:2](x).float().double())


class Counts(nn.Linear):
    """Has buffers that need not be alike, or cannot be compared."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("places", torch.eye(2).to_sparse())
        self.register_buffer("small", torch.ones(2).to(torch.float8_e4m3fn))

    def forward(self, x):
        self.seen += len(x) / (1 + bool(HERE.session.save_at))
        return super().forward(x)


class Widens(nn.Module):
    def forward(self, x):
        return x.double() * (1 + 2.0**-23 * bool(HERE.session.save_at))


def frozen(net, x):
    torch.manual_seed(1)
    with torch.no_grad():
        y = nn.Sequential(nn.Linear(8, 8).float(), Widens())(x.float())
    return net(y)


@pytest.mark.parametrize(
    ("program", "word", "said"),
    [
        (of(mlp, twice), "FAIL", "gradients of step 1 0.weight is 2 of"),
        (of(lambda: mlp().eval(), twice), "FAIL", "gradients of step 1 0.weight is 2 of"),
        (of(mlp, kept), "FAIL", "gradients of step 1 0.weight is 2 of"),
        (raw, "FAIL", "parameter 0 of group 0 is 2 of one process's, samples of some steps are"),
        (of(mlp, nearly), "FAIL", "gradients of step 1"),
        (of(mlp, nearly, lambda net, x: net.double()(x.float().double())), "FAIL", "gradients of"),
        (of(lambda: mlp().bfloat16(), kind=torch.bfloat16), "ABSTAIN", "s cannot be compared"),
        (forgets_decay, "FAIL", "parameters after step 1"),
        (of(normed, call=half_followed), "FAIL", "parameters after step 1 1.running_mean is 1/2"),
        (of(normed), "PASS", " 4 steps"),
        (of(lambda: Counts(8, 1)), "PASS", " 4 steps"),
        (of(mlp, None, frozen), "PASS", "within what float32 in its passes allows"),
        (of(in_rows), "PASS", " 4 steps"),
        (three, "PASS", " 4 steps"),
        (of(mlp, None, lambda net, x: net[2](net[:2](x))), "PASS", " 4 steps"),
    ],
)
def test_a_script_beside_itself(tmp_path, program, word, said):
    def seeded():
        torch.manual_seed(0)
        program()

    told = certified(tmp_path, seeded)
    assert told.verdict == word, told
    assert said in f" {told.where} {told.text}"


def test_a_reference_that_fails_changes_no_later_verdict(tmp_path):
    def program():
        torch.manual_seed(0)
        assert HERE.session.batches == 1
        of(mlp, None, in_single)()

    found = certifier(tmp_path, program)
    assert found.refer().verdict == "PASS"
    before = found.is_double, found._steps, found._narrow
    assert before[:2] == (True, 4) and before[2][1] == "float32"
    assert found.refer(_Reference(batches=2)).verdict == "ERROR"
    assert (found.is_double, found._steps, found._narrow) == before


def test_a_run_s_model_is_freed_at_its_end(tmp_path):
    weights = []

    def program():
        torch.manual_seed(0)
        net = mlp()
        weights.append(ref(net[0].weight))
        trains(net, net.parameters())

    gc.disable()
    try:
        assert certifier(tmp_path, program, 2).refer().verdict == "PASS"
        assert [weight() for weight in weights] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("load", "size"),
    [
        (lambda data: torch.utils.data.DataLoader(dataset=data, batch_size=4), 8),
        (lambda data: torch.utils.data.DataLoader(data, 4, batch_sampler=None), 8),
        (lambda data: torch.utils.data.DataLoader(data), 2),
        (lambda data: torch.utils.data.DataLoader(data, None), None),
        (lambda data: torch.utils.data.DataLoader(data, batch_sampler=[[0]]), None),
    ],
)
def test_loaders_of_the_reference_have_the_batches_of_all_ranks(load, size):
    session = Session(1, {}, is_double=False, batches=2)
    with watched(session):
        HERE.session = session
        try:
            assert load(range(9)).batch_size == size
        finally:
            HERE.session = None


DATA = torch.randn(64, 3, generator=torch.Generator().manual_seed(1))


def fits(*parts, batch_size=8, **given):
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(DATA, DATA.sum(1, keepdim=True))
    given |= {"train_data": data, "batch_size": batch_size, "epochs": 1, "shadow": 0}
    with trainer.Trainer(model=nn.Sequential(*parts), loss=F.mse_loss, **given) as made:
        made.fit()


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"steps": 3}, "3 steps, and again from step 1 on"),
        ({"steps": 1}, "1 step"),
        ({"checkpoint": {"every": 1}}, "4 steps, and again from step 2 on"),
        ({"checkpoint": {"every": 3, "background": False}}, "4 steps, and again from step 2 on"),
        ({"compute": "float16", "loss_scale": 8.0}, "4 steps, and again from step 2 on"),
    ],
)
def test_a_program_of_the_trainer_goes_on_from_half_of_its_steps(tmp_path, given, text):
    install(trainer)
    told = certified(tmp_path, lambda: fits(nn.Linear(3, 1), **given), sees_torch=False)
    assert told == ("PASS", "", text)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("digits_mlp", "--", "--set", "parallel.pip=2"), "pip"),
        (("digits_mlp", "--", "--resume"), "behind -- a job takes --set alone"),
        ((__file__, "--set", "parallel.pipe=2"), "--set is for jobs"),
    ],
)
def test_what_is_given_is_read_or_refused(words, said, capfd):
    assert main(["certify", *words]) == 2
    assert said in capfd.readouterr().err


def test_a_mistake_that_changes_nothing_is_left_out(tmp_path):
    install(trainer)
    found = certifier(tmp_path, lambda: fits(nn.Linear(3, 1), batch_size=1), 1, sees_torch=False)
    assert found.refer().verdict == found.certify({}).verdict == "PASS"
    told = {mistake: found.certify({}, mistake).verdict for mistake in MUTATIONS}
    assert told == {"scale": "FAIL", "drop": "FAIL", "repeat": "LEFT OUT", "stale": "LEFT OUT"}


def test_running_values_of_batch_norm_are_compared(tmp_path, monkeypatch):
    def program():
        fits(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

    install(trainer)
    found = certifier(tmp_path, program, 2, sees_torch=False)
    assert found.refer().verdict == found.certify({}).verdict == "PASS"
    usual = norms.follow

    def follow(state, mean, squares, count, part):
        usual(state, mean, squares, count, part / 2)

    monkeypatch.setattr(norms, "follow", follow)
    wrong = found.certify({}, "of this test")  # beside the same reference
    assert (wrong.verdict, wrong.where) == ("FAIL", "parameters after step 1")
    assert "part1.running_" in wrong.text
