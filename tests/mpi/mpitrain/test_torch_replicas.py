"""DataParallel: what a loop of one's own may do, each as in one process or a clear error."""

import copy
from contextlib import nullcontext
from itertools import product

import numpy as np
import pytest
from mpi4py import MPI

from mpitrain.parallel.replicas import ReplicaMismatch

torch = pytest.importorskip("torch", reason="torch is not installed: make test TORCH=1")
nn = torch.nn
torch.set_num_threads(1)
from mpitrain.adapters.torch import DataParallel as data_parallel  # noqa: E402

pytestmark = pytest.mark.mpi

RANKS = MPI.COMM_WORLD.size
STEPS = 6
ONE_RANK_DIFFERS = pytest.mark.skipif(RANKS == 1, reason="needs a rank that differs")


def perceptron():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2)).double()


def batches():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(STEPS, RANKS * 4, 8)), rng.normal(size=(STEPS, RANKS * 4, 2))
    return torch.from_numpy(x), torch.from_numpy(y)


def own(values, comm):
    return values[4 * comm.rank : 4 * comm.rank + 4]


mse = nn.functional.mse_loss


def fit(module, rank_part, steps=STEPS, forward=None, **zero):
    """Steps of SGD with momentum and decay, so that a gradient of 0 is not the same as none."""
    optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9, weight_decay=0.1)
    x, y = batches()
    for step in range(steps):
        optimizer.zero_grad(**zero)
        mse((forward or module)(rank_part(x[step])), rank_part(y[step])).backward()
        optimizer.step()


def alone(module, **options):
    fit(module, lambda values: values, **options)
    return module


def assert_acts_as_alone(comm, make, act, **options):
    """``act(module, part)`` on this rank's part of the values leads to one process's module."""
    one = make()
    act(one, lambda values: values)
    with data_parallel(comm, make(), bucket_bytes=100, **options) as net:
        act(net, lambda values: own(values, comm))
        assert_equal(comm, net.module, one)


def assert_equal(comm, found, expected, **tolerance):
    """All ranks have equal bits, and the numbers of one process."""
    flat = b"".join(p.detach().contiguous().numpy().tobytes() for p in found.parameters())
    assert len(set(comm.allgather(flat))) == 1
    for one, other in zip(found.parameters(), expected.parameters(), strict=True):
        tolerance = tolerance or dict(rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(one, other, **tolerance)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("lazy", [True, False], ids=["no_sync", "summed each time"])
@pytest.mark.parametrize("to_none", [True, False], ids=["to None", "to 0"])
@pytest.mark.parametrize("passes", [1, 2, 3])
def test_accumulation_and_zero_grad_as_in_one_process(comm, passes, to_none, lazy, overlap):
    x, y = batches()
    net = data_parallel(comm, perceptron(), overlap=overlap, bucket_bytes=500)
    one = perceptron()
    optimizers = [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (net, one)]
    for step in range(STEPS):
        last = step % passes == passes - 1
        with net.no_sync() if lazy and not last else nullcontext():
            (mse(net(own(x[step], comm)), own(y[step], comm)) / passes).backward()
        (mse(one(x[step]), y[step]) / passes).backward()
        if last:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=to_none)
    assert_equal(comm, net.module, one)
    net.close()


def test_reduce_averages_once(comm):
    x, y = batches()
    with data_parallel(comm, perceptron()) as net:
        mse(net(own(x[0], comm)), own(y[0], comm)).backward()
        means = [p.grad.clone() for p in net.parameters()]
        net.reduce()
        assert all(torch.equal(p.grad, mean) for p, mean in zip(net.parameters(), means))
        net.zero_grad()
        with net.no_sync():
            mse(net(own(x[0], comm)), own(y[0], comm)).backward()
        net.reduce()
        for parameter, mean in zip(net.parameters(), means):
            torch.testing.assert_close(parameter.grad, mean)
        net.reduce()
        assert len(set(comm.allgather(net.module[0].weight.grad.numpy().tobytes()))) == 1


def test_it_is_a_module(comm):
    with data_parallel(comm, perceptron()) as net:
        assert list(net.state_dict()) == [f"module.{name}" for name in net.module.state_dict()]
        assert not net.eval().module.training and net.train().module.training
        assert net(input=torch.zeros(1, 8).double()).shape == (1, 2)
        copy.deepcopy(net.module)(torch.zeros(1, 8).double()).sum().backward()
        with pytest.raises(TypeError, match=r"copy or save its \.module"):
            copy.deepcopy(net)
    with pytest.raises(RuntimeError, match="it was closed"):
        net(torch.zeros(1, 8).double())
    with pytest.raises(TypeError, match=r"DataParallel\(Communicator\(comm\), module\)"):
        data_parallel(MPI.COMM_WORLD, perceptron())


class Everything(nn.Module):
    """Tensors of all kinds, different on each rank."""

    def __init__(self, rank):
        super().__init__()
        storage = torch.full((6,), float(rank))
        self.trained = nn.Parameter(torch.full((3, 2), float(rank)))
        self.frozen = nn.Parameter(torch.full((2,), float(rank)), requires_grad=False)
        self.left, self.right = nn.Parameter(storage[:2]), nn.Parameter(storage[2:])
        self.turned = nn.Parameter(torch.full((3, 5), float(rank)).T)
        self.short = nn.Parameter(torch.full((4,), rank, dtype=torch.bfloat16))
        self.whole = nn.Parameter(torch.tensor(rank), requires_grad=False)
        self.again = self.trained
        for name, kind in dict(count=torch.int64, flag=torch.bool, sixteen=torch.float16).items():
            self.register_buffer(name, torch.tensor(rank, dtype=kind))
        self.register_buffer("every_second", torch.full((8,), rank)[::2])
        self.register_buffer("short_buffer", torch.full((3,), rank, dtype=torch.bfloat16))
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("wave", torch.full((2,), rank + 1j).conj())


def test_rank_0_gives_all_their_beginning(comm):
    pytest.importorskip("ml_dtypes")
    with data_parallel(comm, Everything(comm.rank)) as net:
        expected = Everything(0)
        for (name, found), (_, wanted) in zip(
            net.module.state_dict().items(), expected.state_dict().items(), strict=True
        ):
            assert torch.equal(found, wanted), name
        assert net.module.again is net.module.trained


@pytest.mark.parametrize("given", [True, False])
def test_buffers_are_rank_0s_before_each_forward_pass_in_training(comm, given):
    torch.manual_seed(0)
    with data_parallel(comm, nn.BatchNorm1d(3), broadcast_buffers=given) as net:
        for step in range(3):
            net(
                torch.full((4, 3), comm.rank + step + 1.0) * torch.arange(4)[:, None]
            ).sum().backward()
        net(torch.zeros(4, 3))
        means = comm.allgather(tuple(net.module.running_mean.tolist()))
        assert (len(set(means)) == 1) == (given or RANKS == 1)
        assert net.module.num_batches_tracked == 4


class Masked(nn.Linear):
    """Keeps a mask of as many rows as it has seen last."""

    def __init__(self):
        super().__init__(8, 2)
        self.register_buffer("mask", torch.ones(1), persistent=False)

    def forward(self, x):
        if len(self.mask) != len(x):
            self.mask = torch.full((len(x),), 0.5)
        return super().forward(x.float()) * self.mask[:, None]


@ONE_RANK_DIFFERS
@pytest.mark.parametrize("less", [0, -1])
def test_a_buffer_that_a_forward_pass_makes_of_another_shape(comm, less):
    """Found before anybody sends it."""
    with data_parallel(comm, Masked()) as net:
        net(torch.ones(4, 8)).sum().backward()
        assert net.module.mask.shape == (4,)
        rows = 5 + (less if comm.rank else -1 - less)
        with pytest.raises(ValueError, match=r"\('mask'.*, \(4,\).*by broadcast_buffers=False"):
            net(torch.ones(rows, 8)).sum().backward()
    with data_parallel(comm, Masked(), broadcast_buffers=False) as net:
        for _ in range(3):
            net(torch.ones(rows, 8)).sum().backward()
        net.module.bias.requires_grad_(False)  # the buckets are others
        net(torch.ones(rows, 8)).sum().backward()
        assert net.module.mask.shape == (rows,)
        expected = torch.tensor([2.0 * sum(comm.allgather(rows)) / RANKS])
        torch.testing.assert_close(net.module.weight.grad[:1, 0], expected)


def adversaries(wrap, part):
    """The parameters of a generator and of a discriminator, which is frozen in every other pass."""
    torch.manual_seed(0)
    makes, judges = (nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(2))
    maker, judge = wrap(makes.double()), wrap(judges.double())
    optimizers = [torch.optim.Adam(m.parameters(), 0.01) for m in (makes, judges)]
    for step in range(4):
        noise, real = (
            part(torch.randn(12 * RANKS, 8, generator=torch.Generator().manual_seed(2 * step + n)))
            for n in range(2)
        )
        noise, real = noise.double(), real.double().requires_grad_()
        judges.requires_grad_(True)
        optimizers[1].zero_grad()
        scores = judge(real)
        (slope,) = torch.autograd.grad(scores.sum(), real, create_graph=True)
        fake = judge(maker(noise).detach())
        (fake.sigmoid().mean() - scores.mean() + slope.pow(2).sum(1).mean()).backward()
        optimizers[1].step()
        judges.requires_grad_(False)
        optimizers[0].zero_grad()
        (-judge(maker(noise))).sigmoid().mean().backward()
        optimizers[0].step()
    return nn.ModuleList([makes, judges])


def test_two_that_train_against_each_other(comm):
    nets = []

    def wrap(module):
        nets.append(data_parallel(comm, module))
        return nets[-1]

    found = adversaries(wrap, lambda x: x[12 * comm.rank : 12 * comm.rank + 12])
    assert_equal(comm, found, adversaries(lambda module: module, lambda x: x))
    for net in nets:
        net.close()


@ONE_RANK_DIFFERS
def test_a_rank_whose_steps_are_others_is_found_at_the_end(comm):
    net = data_parallel(comm, nn.Linear(8, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(7):
        if step == 5 and comm.rank == 1:
            optimizer.param_groups[0]["lr"] = 0.2
        optimizer.zero_grad()
        net(torch.ones(2, 8)).sum().backward()
        optimizer.step()
    with pytest.raises(ReplicaMismatch, match="at the end"):
        net.close()


class Branches(nn.Module):
    """Uses the layers that it is told to, in the order that it is told."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList(nn.Linear(8, 2) for _ in range(4)).double()

    def forward(self, x, which):
        return sum(self.parts[index](x) for index in which)


def test_ranks_may_use_other_parts_in_another_order(comm):
    x, y = batches()
    one = Branches()
    with data_parallel(comm, Branches(), bucket_bytes=100) as net:
        optimizers = [torch.optim.AdamW(m.parameters(), 0.01) for m in (one, net)]
        for step in range(STEPS):
            for optimizer in optimizers:
                optimizer.zero_grad()
            parts = [np.random.default_rng(r + step).permutation(3)[:2] for r in range(RANKS)]
            mse(net(own(x[step], comm), parts[comm.rank]), own(y[step], comm)).backward()
            for rank, which in enumerate(parts):
                rows = slice(4 * rank, 4 * rank + 4)
                (mse(one(x[step][rows], which), y[step][rows]) / RANKS).backward()
            for optimizer in optimizers:
                optimizer.step()
        assert_equal(comm, net.module, one)


@ONE_RANK_DIFFERS
def test_a_rank_without_any_part_reduces_by_hand(comm):
    torch.manual_seed(0)
    with data_parallel(comm, nn.Linear(2, 1)) as net:
        out = net(torch.ones(1, 2))
        if comm.rank:
            out.sum().backward()
        net.reduce()
        torch.testing.assert_close(net.module.bias.grad, torch.tensor([(RANKS - 1) / RANKS]))


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        raise KeyError("a bug of the caller's")


@pytest.mark.parametrize("overlap", [True, False])
def test_training_goes_on_after_an_error_in_backward(comm, overlap):
    x, y = batches()
    with data_parallel(comm, perceptron(), overlap=overlap, bucket_bytes=100) as net:
        for again in range(2):
            inside = Fails.apply(net.module[0](own(x[0], comm)))
            with pytest.raises(KeyError) as error:
                mse(net.module[2](inside), own(y[0], comm)).backward()
            if again:
                net.zero_grad()
        fit(net, lambda values: own(values, comm))
        assert_equal(comm, net.module, alone(perceptron()))
        assert error  # its traceback is alive, and holds nothing of ours up


@ONE_RANK_DIFFERS
def test_an_error_in_backward_on_one_rank_ends_in_one_on_all(comm):
    net = data_parallel(comm, perceptron())
    out = net.module[2](net(torch.ones(1, 8).double()).new_ones(1, 16))
    if comm.rank == 0:
        with pytest.raises(KeyError):
            net.module[2](Fails.apply(net.module[0](torch.ones(1, 8).double()))).sum().backward()
    with pytest.raises(RuntimeError, match="rank 0 gives up a backward pass that raised an error"):
        out.sum().backward() if comm.rank else net(torch.ones(1, 8).double())
    with pytest.raises(RuntimeError, match="cannot be used any more: the replicas have parted"):
        net(torch.ones(1, 8).double())


def test_one_rank_may_evaluate_alone(comm):
    with data_parallel(comm, perceptron()) as net:
        if comm.rank == 0:
            with torch.no_grad():
                net(torch.ones(1, 8).double())
            net.eval()
            x = torch.ones(1, 8).double().requires_grad_()
            torch.autograd.grad(net(x).sum(), x)
            net.train()
        fit(net, lambda values: own(values, comm))
        assert_equal(comm, net.module, alone(perceptron()))


def embedded(net):
    net(torch.tensor([1])).sum().backward()


def stepping(net):
    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    net(torch.ones(1, 8).double()).sum().backward()


def graph_on_one_rank(net):
    last = MPI.COMM_WORLD.rank == RANKS - 1
    net(torch.ones(1, 8).double()).square().sum().backward(create_graph=last)


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize(
    ("make", "act", "match"),
    [
        (lambda: nn.Embedding(5, 2, sparse=True), embedded, "weight: its gradient is sparse"),
        (perceptron, stepping, "step after backward"),
        (perceptron, graph_on_one_rank, "create_graph=True"),
    ],
)
def test_gradients_that_have_no_mean_are_refused(comm, make, act, match):
    with data_parallel(comm, make()) as net:
        with pytest.raises(RuntimeError, match=match):
            act(net)
        net.zero_grad()
        if act is graph_on_one_rank:  # training goes on
            fit(net, lambda values: own(values, comm))
            assert_equal(comm, net.module, alone(perceptron()))


class Checkpointed(nn.Module):
    """``where``: which of two layers, or of two calls of one layer, are computed again."""

    def __init__(self, reentrant, where, shared):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.head = nn.Linear(8, 8).double(), nn.Linear(8, 2).double()
        one, other = (nn.Linear(8, 8).double() for _ in range(2))
        self.middle = nn.ModuleList([one, one if shared else other])
        self.options, self.where = dict(use_reentrant=reentrant), where

    def forward(self, x):
        x = self.stem(x).tanh()
        for index, layer in enumerate(self.middle):
            if index in self.where:
                x = torch.utils.checkpoint.checkpoint(layer, x, **self.options)
            else:
                x = layer(x)
        return self.head(x)


@pytest.mark.parametrize(
    ("reentrant", "where", "shared"),
    [*product((True, False), ([0], [1], [0, 1]), (False,)), (True, [0, 1], True)],
)
def test_checkpointed_modules(comm, reentrant, where, shared):
    """Autograd comes by a shared layer twice in a pass."""
    assert_acts_as_alone(comm, lambda: Checkpointed(reentrant, where, shared), fit)


def checkpointed(module, part):
    again = lambda x: torch.utils.checkpoint.checkpoint(module, x, use_reentrant=False)  # noqa: E731
    fit(module, part, forward=again)


def of_several_graphs(module, part):
    """Two forward passes, and one graph twice."""
    x, y = batches()
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    for step in range(2):
        loss = mse(module(part(x[step])), part(y[step]))
        loss = loss + mse(module(part(x[step + 2])), part(y[step + 2]))
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("act", [checkpointed, of_several_graphs])
def test_graphs_are_those_of_one_process(comm, act):
    assert_acts_as_alone(comm, perceptron, act)


@pytest.mark.parametrize("overlap", [True, False])
def test_two_replicas_in_one_backward_pass_in_any_order(comm, overlap):
    x, y = batches()
    a, b, one, two = perceptron(), perceptron(), perceptron(), perceptron()
    options = dict(overlap=overlap, bucket_bytes=100)
    with data_parallel(comm, a, **options) as left, data_parallel(comm, b, **options) as right:
        nets = (a, b) if comm.rank % 2 else (b, a)
        optimizer = torch.optim.SGD([*left.parameters(), *right.parameters()], 0.1)
        expected = torch.optim.SGD([*one.parameters(), *two.parameters()], 0.1)
        for step in range(STEPS):
            optimizer.zero_grad()
            expected.zero_grad()
            sum(mse(net(own(x[step], comm)), own(y[step], comm)) for net in nets).backward()
            sum(mse(net(x[step]), y[step]) for net in (one, two)).backward()
            optimizer.step()
            expected.step()
        assert_equal(comm, a, one)
        assert_equal(comm, b, two)


def unfreeze(module):
    module[0].requires_grad_(True)


def freeze(module):
    module[2].weight.requires_grad_(False)


def replace(module):
    module[2].weight = nn.Parameter(torch.full((2, 16), 0.1).double())


def add(module):
    module.append(nn.Linear(2, 2).double())
    with torch.no_grad():
        module[-1].weight.copy_(torch.eye(2))
        module[-1].bias.zero_()


def swap(module):
    module[2].weight.data = torch.full((2, 16), 0.2).double()


def load(module):
    module.load_state_dict({name: v * 0.5 for name, v in module.state_dict().items()})


@pytest.mark.parametrize("change", [unfreeze, freeze, replace, add, swap, load])
@pytest.mark.parametrize("wrapper", [True, False], ids=["forward by it", "forward by the module"])
def test_a_module_may_change_between_steps(comm, change, wrapper):
    def make():
        module = perceptron()
        module[0].requires_grad_(False)
        return module

    def act(module, part):
        inner = getattr(module, "module", module)
        for _ in range(2):
            fit(module, part, steps=3, forward=module if wrapper else inner)
            change(inner)

    assert_acts_as_alone(comm, make, act)


@ONE_RANK_DIFFERS
@pytest.mark.parametrize("change", [unfreeze, freeze, add])
def test_a_module_that_changes_on_one_rank_is_refused_on_all(comm, change):
    module = perceptron()
    module[0].requires_grad_(False)
    with data_parallel(comm, module) as net:
        fit(net, lambda values: own(values, comm), steps=3)
        if comm.rank == 1:
            change(net.module)
        with pytest.raises(ValueError, match="the ranks have different modules"):
            fit(net, lambda values: own(values, comm), steps=1)


@ONE_RANK_DIFFERS
@pytest.mark.parametrize(("change", "steps"), [(swap, 1), (load, 1), (load, 4)])
def test_values_that_change_on_one_rank_are_found_on_all(comm, change, steps):
    """At once, as torch counts the changes, or in the next pass in which values are compared."""
    with data_parallel(comm, perceptron()) as net:
        fit(net, lambda values: own(values, comm), steps=steps)
        if comm.rank == 1:
            change(net.module)
        with pytest.raises(ReplicaMismatch, match=f"forward pass {steps + 1}"):
            fit(net, lambda values: own(values, comm), steps=1)


def test_a_module_in_another_type_from_now_on(comm):
    with data_parallel(comm, perceptron().float()) as net:
        net.zero_grad()
        net(torch.ones(1, 8)).sum().backward()
        net.double()
        net.zero_grad()
        fit(net, lambda values: own(values, comm))
        one = perceptron().float().double()
        assert_equal(comm, net.module, alone(one))


class Types(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        kinds = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64]
        self.values = nn.ParameterList(torch.ones(n + 1, dtype=k) for n, k in enumerate(kinds))
        self.nothing = nn.Parameter(torch.zeros(0, 3))
        self.scalar = nn.Parameter(torch.tensor(2.0))

    def forward(self, scale):
        values = [*self.values, self.nothing, self.scalar]
        return sum((v.abs().sum() * scale).double() for v in values)


@pytest.mark.parametrize("overlap", [True, False])
def test_parameters_of_several_types(comm, overlap):
    pytest.importorskip("ml_dtypes")
    with data_parallel(comm, Types(), overlap=overlap, bucket_bytes=4) as net:
        net(comm.rank + 1.0).backward()
        for value in net.parameters():
            mean = torch.full_like(value.grad, (RANKS + 1) / 2)
            torch.testing.assert_close(value.grad, mean, rtol=1e-2, atol=0)
            same = comm.allgather(value.grad.view(torch.uint8).tolist() if value.ndim else 0)
            assert all(other == same[0] for other in same)


def test_any_layout_of_memory(comm):
    def make():
        torch.manual_seed(0)
        body = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(16, 2)).double()
        return body.to(memory_format=torch.channels_last)

    x = torch.randn(RANKS * 4, 2, 4, 4, generator=torch.Generator().manual_seed(0)).double()

    def act(module, part):
        optimizer = torch.optim.AdamW(module.parameters(), 0.01, fused=True)
        for _ in range(3):
            optimizer.zero_grad()
            module(part(x)).square().mean().backward()
            optimizer.step()

    assert_acts_as_alone(comm, make, act)


def test_gradients_given_by_hand(comm):
    with data_parallel(comm, nn.Linear(2, 1)) as net:
        for parameter in net.parameters():
            parameter.grad = torch.full_like(parameter, 1.0 + comm.rank)
        kept = net.module.bias.grad
        with net.no_sync():
            net(torch.zeros(1, 2)).sum().backward()
        net.reduce()
        torch.testing.assert_close(net.module.bias.grad, torch.tensor([1 + (RANKS + 1) / 2]))
        assert net.module.bias.grad is kept


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: nn.Flatten(), "no parameter needs a gradient"),
        (lambda: nn.LazyLinear(2), "run the module once before"),
        (lambda: nn.Linear(2, 2, device="meta"), r"on meta; dense ones on the CPU.*module\.cpu"),
        (lambda: nn.Linear(2, 2).to(torch.float8_e4m3fn), "float8_e4m3fn, which cannot"),
        (lambda: nn.Sequential(nn.SyncBatchNorm(2)), "0 is a SyncBatchNorm, which would normalise"),
    ],
    ids=["no parameters", "lazy", "elsewhere", "float8", "SyncBatchNorm"],
)
def test_what_cannot_be_a_replica_is_refused_on_all_ranks(comm, make, match):
    last = comm.rank == RANKS - 1
    with pytest.raises(ValueError, match=match):
        data_parallel(comm, make() if last else nn.Linear(2, 2))


@ONE_RANK_DIFFERS
def test_other_modules_on_other_ranks_are_refused(comm):
    with pytest.raises(
        ValueError, match=r"only rank 1 has \[\('weight', 'torch.float32', \(3, 2\)"
    ):
        data_parallel(comm, nn.Linear(2, 3 if comm.rank == 1 else 2))


@ONE_RANK_DIFFERS
@pytest.mark.parametrize(
    "options",
    [dict(bucket_bytes=8), dict(algorithm="ring"), dict(broadcast_buffers=False)],
    ids=str,
)
def test_other_options_on_other_ranks_are_refused(comm, options):
    with pytest.raises(ValueError, match="give all ranks the same"):
        data_parallel(comm, perceptron(), **(options if comm.rank == 1 else {}))


GOES_FORWARD = "rank 0 goes forward in training"


@ONE_RANK_DIFFERS
@pytest.mark.parametrize(
    ("how", "match"),
    [
        ("eval", "the replicas have parted"),
        ("no_sync", "the replicas have parted"),
        ("another", "the replicas have parted"),
        ("backward", f"{GOES_FORWARD}, rank 1 averages"),
        ("second", f"{GOES_FORWARD} in DataParallel .*, rank 1 goes forward in training in"),
        ("weigh", f"{GOES_FORWARD}, rank 1 weighs its batch"),
        ("close", f"{GOES_FORWARD}, rank 1 closes"),
    ],
)
def test_a_rank_that_is_elsewhere_is_found(comm, how, match):
    net, second = (data_parallel(comm, perceptron()) for _ in range(2))
    x = torch.ones(1, 8).double()
    out = net(x)
    if how != "backward":
        out.sum().backward()
    differs = {
        "eval": lambda: net.eval()(x).sum().backward(),
        "close": net.close,
        "another": lambda: data_parallel(comm, perceptron()),
        "backward": lambda: out.sum().backward(),
        "second": lambda: second(x),
        "weigh": lambda: net.weigh(1),
    }
    lazy = comm.rank == 1 and how == "no_sync"
    with (
        pytest.raises(RuntimeError, match=match),
        net.no_sync() if lazy else nullcontext(),
    ):
        if comm.rank == 1 and how in differs:
            differs[how]()
        else:
            net(x).sum().backward()
        net.close()  # who has gone on is found there
