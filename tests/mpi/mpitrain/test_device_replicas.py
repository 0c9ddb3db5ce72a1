"""A loop of one's own whose gradients lie on a device, by the strict stand-in for CuPy.

torch's tensors on the CPU stand for those on a GPU: buckets are the stand-in's memory.
"""

from contextlib import nullcontext

import numpy as np
import pytest
from mpi4py import MPI

from collectives import Communicator
from collectives.execution.device_plan import DevicePlan
from tests import strict_cupy
from tests.strict_cupy import counts

torch = pytest.importorskip("torch", reason="torch is not installed: make test TORCH=1")
from mpitrain.adapters.torch import DataParallel, DistributedDataParallel, buckets  # noqa: E402
from mpitrain.adapters.torch import comm_hooks as torch_hooks  # noqa: E402

pytestmark = [pytest.mark.mpi, pytest.mark.at_most(5)]

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size


@pytest.fixture
def device(monkeypatch):
    """Buckets lie there."""
    monkeypatch.setattr(counts, "polls", 2)
    cupy = strict_cupy.install(monkeypatch)
    monkeypatch.setattr(buckets, "memory_of", lambda parameter: "cupy")
    monkeypatch.setattr(torch_hooks, "namespace_of", lambda tensor: cupy)
    with Communicator(MPI.COMM_WORLD, device="staged") as comm:
        yield comm


def module(dtype=torch.float64):
    torch.manual_seed(7)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 9), torch.nn.BatchNorm1d(9), torch.nn.ReLU(), torch.nn.Linear(9, 2)
    ).to(dtype)


def batches(steps, rows=8):
    """Equal on all ranks, each of which takes its own rows."""
    draw = torch.Generator().manual_seed(11)
    for _ in range(steps):
        x = torch.rand(rows * SIZE, 6, generator=draw, dtype=torch.float64)
        yield x, x[:, :2].sin()


def loop(comm, dtype=torch.float64, steps=3, accumulate=False, hook=None, **options):
    """The parameters after some steps, and the last gradients."""
    net = module(dtype)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with DataParallel(comm, net, bucket_bytes=200, **options) as replica:
        if hook is not None:
            replica.register_comm_hook(replica, hook)
        for x, y in batches(steps):
            own = slice(RANK * 8, RANK * 8 + 8)
            optimizer.zero_grad()
            parts = [(x[own][:4], y[own][:4]), (x[own][4:], y[own][4:])]
            for number, (inputs, labels) in enumerate(parts):
                with replica.no_sync() if accumulate and number == 0 else nullcontext():
                    given = replica(inputs.to(dtype))
                    torch.nn.functional.mse_loss(given, labels.to(dtype)).backward()
            optimizer.step()
    return [p.detach().clone() for p in net.parameters()], [p.grad for p in net.parameters()]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_parameters_are_those_of_sums_on_the_host(device, dtype, overlap, accumulate):
    with Communicator(MPI.COMM_WORLD) as comm:
        given = {"dtype": dtype, "overlap": overlap, "accumulate": accumulate}
        right = loop(comm, algorithm="ring", **given)
        found = loop(device, algorithm="ring", **given)
    for one, other in zip([*right[0], *right[1]], [*found[0], *found[1]], strict=True):
        assert torch.equal(one, other)


def test_buckets_are_plans_on_device_memory(device):
    with DataParallel(device, module(), bucket_bytes=200) as replica:
        plans = [bucket._plan for bucket in replica._reducer.buckets._buckets]
        assert len(plans) > 1
        assert SIZE == 1 or all(isinstance(plan, DevicePlan) for plan in plans)


def test_a_hook_s_sums_lie_there_too(device):
    def halves(replica, bucket):
        part = bucket.buffer() / SIZE
        return replica.all_reduce(part).then(lambda future: future.value()[0])

    with Communicator(MPI.COMM_WORLD) as comm:
        right = loop(comm)
    found = loop(device, hook=halves)
    for one, other in zip(right[0], found[0], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([0], "device_ids names cuda:0, and the module lies on cpu; a rank has one GPU"),
        (["cpu", 1], "device_ids names cpu, cuda:1, and the module lies on cpu"),
    ],
)
def test_devices_that_are_not_the_module_s(given, message):
    with pytest.raises(ValueError, match=message):
        DistributedDataParallel(module(), device_ids=given)


def test_inputs_are_moved_to_the_module_s_device():
    class Seen(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up = torch.nn.Linear(2, 2)

        def forward(self, pair, *, more):
            assert more["x"].device == torch.device("cpu") and pair[1] == "kept"
            return self.up(pair[0] + more["x"])

    net = DistributedDataParallel(Seen(), device_ids=["cpu"])
    one = torch.ones(3, 2)
    net((one, "kept"), more={"x": one}).sum().backward()
    assert np.isfinite(net.module.up.weight.grad.numpy()).all()
    net.close()
