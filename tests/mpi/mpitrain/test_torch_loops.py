"""Loops of one's own over DataParallel, whole: each step's gradients are one process's."""

import copy
from contextlib import nullcontext
from functools import partial
from itertools import product

import numpy as np
import pytest
from mpi4py import MPI

from mpitrain.parallel.replicas import ReplicaMismatch

torch = pytest.importorskip("torch", reason="torch is not installed: make test TORCH=1")
nn = torch.nn
torch.set_num_threads(1)
from mpitrain.adapters.torch import DataParallel, DistributedDataParallel  # noqa: E402

pytestmark = [pytest.mark.mpi, pytest.mark.at_most(5)]
data_parallel = partial(DataParallel, bucket_bytes=300)

RANKS = MPI.COMM_WORLD.size
EXACT = dict(rtol=1e-12, atol=1e-14)
ONE_RANK_DIFFERS = pytest.mark.skipif(RANKS == 1, reason="needs a rank that differs")


def perceptron():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2)).double()


class Mixture(nn.Module):
    """A frozen layer, tied parameters, a buffer that counts, and a layer that nobody uses."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.frozen, self.unused = nn.Linear(8, 8), nn.Linear(3, 3)
        self.there, self.back = nn.Linear(8, 6), nn.Linear(6, 8, bias=False)
        self.back.weight = nn.Parameter(self.there.weight.detach().T.contiguous())
        self.again = nn.Linear(8, 8)
        self.again.weight = self.frozen.weight
        self.tied = self.back
        self.head = nn.Linear(8, 2)
        self.frozen.requires_grad_(False)
        self.register_buffer("passes", torch.zeros(()))
        self.double()

    def forward(self, x):
        self.passes += 1
        x = self.again(self.frozen(x)).tanh()
        x = self.back(self.there(x)).tanh()
        return self.head(self.tied(self.there(x)) * (1 + 0.01 * self.passes))


def data(samples, seed=0):
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(samples, 8)), rng.normal(size=(samples, 2))
    return torch.from_numpy(x), torch.from_numpy(y)


def squares(scores, truth):
    return nn.functional.mse_loss(scores, truth, reduction="sum")


mse = nn.functional.mse_loss


def gradients(module):
    return [None if p.grad is None else p.grad.clone() for p in module.parameters()]


def assert_alike(found, expected, **tolerance):
    for mine, one in zip(found, expected, strict=True):
        assert (mine is None) == (one is None)
        if one is not None:
            torch.testing.assert_close(mine, one, **(tolerance or EXACT))


CLIPS = {
    "norm": lambda p: nn.utils.clip_grad_norm_(p, 0.1),
    "value": lambda p: nn.utils.clip_grad_value_(p, 0.01),
}


@pytest.mark.parametrize("lazy", [True, False], ids=["no_sync", "summed each time"])
@pytest.mark.parametrize("clip", CLIPS)
def test_a_whole_loop_has_the_gradients_of_one_process(comm, clip, lazy):
    """Two passes a step, clipping, a last batch that is shorter and shared unequally."""
    batch, parts = 4 * RANKS, 2
    x, y = data(3 * batch - RANKS - 1)
    one = Mixture()
    with data_parallel(comm, Mixture()) as net:
        for module in (net, one):
            mine, taken = module is net, []
            optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], 0.01)
            for start in range(0, len(x), batch):
                rows = torch.arange(start, min(start + batch, len(x)))
                for number, part in enumerate(rows.chunk(parts)):
                    own = part[comm.rank :: RANKS] if mine else part
                    last = number == parts - 1
                    with net.no_sync() if mine and lazy and not last else nullcontext():
                        loss = squares(module(x[own]), y[own]) / len(rows)
                        (loss * RANKS if mine else loss).backward()
                CLIPS[clip]([p for p in module.parameters() if p.grad is not None])
                taken += gradients(module)
                optimizer.step()
                optimizer.zero_grad()
            if mine:
                found = taken
        assert_alike(found, taken)
        assert_alike(net.module.state_dict().values(), one.state_dict().values())


def test_weighed_batches_are_means_over_samples(comm):
    """Also on top of an earlier mean, and with a rank that has no sample, whose loss is no
    number."""
    x, y = data(RANKS * 3)
    starts = np.cumsum([0, *(max(r, RANKS == 1) for r in range(RANKS))])
    rows = slice(starts[comm.rank], starts[comm.rank + 1])
    one = perceptron()
    with data_parallel(comm, perceptron()) as net:
        for _ in range(2):
            net.weigh(len(x[: starts[-1]][rows]))
            mse(net(x[rows]), y[rows]).backward()
            mse(one(x[: starts[-1]]), y[: starts[-1]]).backward()
            assert_alike(gradients(net), gradients(one))
        net.zero_grad()
        one.zero_grad()
        mse(net(x[:3]), y[:3]).backward()  # the weights were for one pass
        mse(one(x[:3]), y[:3]).backward()
        assert_alike(gradients(net), gradients(one))
        for wrong in (-1, float("nan"), "three"):
            with pytest.raises(RuntimeError, match=f"{wrong!r} is no number of samples"):
                net.weigh(wrong if comm.rank == RANKS - 1 else 3)
        with pytest.raises(RuntimeError, match="no rank has a sample"):
            net.weigh(0)


def test_the_call_of_torchs(comm):
    """By position, by name, and with torch's defaults, on all ranks or on those of ``comm``."""
    x, y = data(RANKS * 4)
    one, rows = perceptron(), slice(4 * comm.rank, 4 * comm.rank + 4)
    mse(one(x), y).backward()
    left_out = dict(process_group=None, bucket_cap_mb=None, check_reduction=False)
    left_out |= dict(delay_all_reduce_named_params=None, skip_all_reduce_unused_params=False)
    for given, named in (
        ((), dict(bucket_cap_mb=0.001, find_unused_parameters=True, device_ids=None)),
        ((), dict(comm=comm)),
        ((), dict(comm=MPI.COMM_WORLD)),
        ((), dict(device_ids=["cpu"], output_device="cpu")),
        ((["cpu"], torch.device("cpu"), 0), {}),
        ((None, None), dict(dim=0)),
        ((), left_out),
    ):
        with DistributedDataParallel(perceptron(), *given, **named) as net:
            mse(net(x[rows]), y[rows]).backward()
            assert_alike(gradients(net), gradients(one))
    for wrong in (dict(process_group=comm), dict(bucket_cap=1)):
        with pytest.raises(TypeError, match=f"has no option {next(iter(wrong))}; "):
            DistributedDataParallel(perceptron(), **wrong)


@pytest.mark.parametrize(
    ("wrong", "kind", "message"),
    [
        (dict(output_device=0), ValueError, "output_device names cuda:0, and the module lies on"),
        (dict(output_device="no device"), RuntimeError, "device"),
        (dict(dim=1), TypeError, "has no option dim = 1; samples lie along axis 0"),
        (dict(skip_all_reduce_unused_params=True), TypeError, "unused_params = True; see"),
        *((dict(bucket_cap_mb=n), ValueError, f"bucket_cap_mb = {n!r}: .* finite number above 0")
          for n in (-1, 0, float("nan"), float("inf"), "25")),
    ],
)  # fmt: skip
def test_what_torchs_call_cannot_be_is_said_on_all_ranks(comm, wrong, kind, message):
    given = wrong if comm.rank == RANKS - 1 else {}
    with pytest.raises(kind, match=message):
        DistributedDataParallel(perceptron(), comm=comm, **given)


def test_autocast_is_that_of_the_module(comm):
    x, _ = data(4)
    torch.manual_seed(0)
    one = nn.Linear(8, 2)
    with data_parallel(comm, copy.deepcopy(one)) as net:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            scores, expected = net(x.float()), one(x.float())
        assert scores.dtype == torch.bfloat16 and torch.equal(scores, expected)
        scores.sum().backward()
        expected.sum().backward()
        assert {p.grad.dtype for p in net.parameters()} == {torch.float32}
        assert_alike(gradients(net), gradients(one), rtol=1e-6, atol=0)


DIVISORS = "all", "those with a batch", "samples"
QUICK = ("all", True, 1), ("those with a batch", False, 2), ("samples", True, 2)


@pytest.mark.parametrize(
    ("divisor", "first", "passes"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
        for case in product(DIVISORS, (True, False), (1, 2))
    ],
)
def test_join_of_ranks_with_unequally_many_batches(comm, divisor, first, passes):
    """Two epochs of SGD with momentum and a schedule, two layers and running statistics.

    ``first``: whether rank 0 is the first or the last to leave.
    """

    def make():
        torch.manual_seed(0)
        body = nn.BatchNorm1d(8, momentum=0.5), nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 2)
        return nn.Sequential(*body).double()

    def tools(module):
        optimizer = torch.optim.SGD(module.parameters(), 0.05, momentum=0.9)
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)

    counts = [(rank if first else RANKS - 1 - rank) + 2 for rank in range(RANKS)]
    sizes = [3 + rank for rank in range(RANKS)]
    x, truth = data(max(sizes))

    def loss(module, rank, step, number):
        drawn, rows = (0.1 * (step + 1) + 0.3 * number) * x, slice(sizes[rank])
        return mse(module(drawn[rows]), truth[rows])

    net, one = data_parallel(comm, make()), make()
    own, ones = tools(net), tools(one)
    for _ in range(2):
        with net.join(*own, divide_by_initial_world_size=divisor == "all"):
            for step in range(counts[comm.rank]):
                for number in range(passes):
                    last = number == passes - 1
                    with nullcontext() if last else net.no_sync():
                        if divisor == "samples" and last:
                            net.weigh(sizes[comm.rank])
                        loss(net, comm.rank, step, number).backward()
                for tool in own:
                    tool.step()
                net.zero_grad()
        for step in range(max(counts)):
            active = [r for r in range(RANKS) if counts[r] > step]
            parts = {r: sizes[r] if divisor == "samples" else 1 for r in active}
            whole = RANKS if divisor == "all" else sum(parts.values())
            for number, r in product(range(passes), active):
                kept = [buffer.clone() for buffer in one.buffers()]
                (loss(one, r, step, number) * parts[r] / whole).backward()
                if r != active[0]:  # whose buffers all ranks take over
                    for buffer, values in zip(one.buffers(), kept):
                        buffer.copy_(values)
            for tool in ones:
                tool.step()
            one.zero_grad()
        assert_alike(net.module.state_dict().values(), one.state_dict().values())
    flat = b"".join(value.numpy().tobytes() for value in net.module.state_dict().values())
    assert len(set(comm.allgather(flat))) == 1
    net.close()


def batches_of(comm, batches):
    """Rank 1 has one batch less."""
    return range(batches - (comm.rank == 1))


@ONE_RANK_DIFFERS
def test_join_without_the_optimizer_is_found_when_its_state_matters(comm):
    net = data_parallel(comm, perceptron())
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    with pytest.raises(ReplicaMismatch, match="forward pass 2"):
        for _ in range(2):
            with net.join():
                for _ in batches_of(comm, 3):
                    net(data(1)[0]).sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()


def lost(net):
    with net.no_sync():
        net(data(1)[0]).sum().backward()


@ONE_RANK_DIFFERS
@pytest.mark.parametrize(
    ("options", "before", "match"),
    [
        (dict(throw_on_early_termination=True), lambda net: None, "rank 1: it has no batch left"),
        ({}, lost, r"rank 1: .* gradients from no_sync\(\) that no mean has"),
        ({}, lambda net: net.weigh(1), "rank 0 goes forward in training, rank 1 weighs"),
    ],
    ids=["throw", "no_sync", "weigh"],
)
def test_who_leaves_a_join_wrongly_is_found_on_all_ranks(comm, options, before, match):
    net = data_parallel(comm, perceptron())
    with pytest.raises(RuntimeError, match=match), net.join(**options):
        for _ in batches_of(comm, 3):
            net(data(1)[0]).sum().backward()
            net.zero_grad()
        if comm.rank == 1:
            before(net)


@ONE_RANK_DIFFERS
@pytest.mark.parametrize("way", ["refused", "zeroed", "by ranks with a batch"])
def test_means_that_pile_up_in_a_join(comm, way):
    """The mean of an earlier pass must not shrink when ranks have gone."""
    x, _ = data(1)
    refused = pytest.raises(RuntimeError, match=r"accumulate in no_sync\(\), weigh\(\)")
    one = perceptron()
    with data_parallel(comm, perceptron()) as net:
        with (
            refused if way == "refused" else nullcontext(),
            net.join(divide_by_initial_world_size=way != "by ranks with a batch"),
        ):
            for _ in batches_of(comm, 3):
                if way == "zeroed":
                    net.zero_grad(set_to_none=False)
                net(x).sum().backward()
        if way == "by ranks with a batch":
            (3 * one(x).sum()).backward()
        elif way == "zeroed":
            ((RANKS - 1) / RANKS * one(x).sum()).backward()
        if way != "refused":
            assert_alike(gradients(net), gradients(one))


@ONE_RANK_DIFFERS
def test_join_needs_one_place_and_the_same_arguments(comm):
    net, other = (data_parallel(comm, perceptron()) for _ in range(2))
    with (
        pytest.raises(ValueError, match="give all ranks the same"),
        net.join(divide_by_initial_world_size=comm.rank == 1),
    ):
        pass
    with pytest.raises(TypeError, match=r"join\(\) takes optimisers"), net.join(False):
        pass
    with net.join(enable=False):
        net(data(1)[0]).sum().backward()
    with (
        pytest.raises(RuntimeError, match=r"the replicas have parted: .* has no batch left"),
        other.join(),
        net.join(),
    ):
        for _ in batches_of(comm, 3):
            other(data(1)[0]).sum().backward()
