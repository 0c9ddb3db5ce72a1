"""Loops of one's own over MPI: copies, averages, shards and compiled modules."""

import copy

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.mpi.collectives.test_torch_node_memory import batches, own, two_layers

pytestmark = [pytest.mark.quick_on(3), pytest.mark.usefixtures("world")]


#: Steps do not magnify the roundings of gradients near zero.
OPTIONS = {"lr": 1e-2, "eps": 1e-4, "weight_decay": 0.1}


def adamw(parameters):
    return torch.optim.AdamW(parameters, **OPTIONS)


def step(module, optimizer, batch):
    optimizer.zero_grad()
    module(batch).square().mean().backward()
    optimizer.step()


def assert_close(module, other):
    for mine, wanted in zip(module.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-10, atol=1e-12)


def averaged(module):
    return AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.9))


@pytest.mark.slow
def test_a_compiled_module_traces_nothing_of_ours():
    """C++ waits for works and calls hooks within frames that torch.compile would look into."""
    pytest.importorskip("torch._dynamo")
    from torch._dynamo.utils import get_compilation_metrics

    net = DistributedDataParallel(two_layers())
    compiled, plain = torch.compile(net, backend="eager"), two_layers()
    for batch in batches(3):
        for module, rows in ((compiled, own(batch)), (plain, batch)):
            module.zero_grad()
            module(rows).square().mean().backward()
    for mine, wanted in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, wanted.grad, rtol=1e-10, atol=1e-12)
    traced = [metrics.co_filename for metrics in get_compilation_metrics()]
    assert traced and not [name for name in traced if "collectives/torch/" in str(name)]


@pytest.mark.parametrize("views", [False, True])
def test_copies_and_averages_of_what_is_wrapped(views):
    """An average follows, and a copy is trained by itself, as in one process."""
    net = DistributedDataParallel(two_layers(), gradient_as_bucket_view=views)
    alone = two_layers()
    average, expected = averaged(net), averaged(alone)
    optimizer, single = adamw(net.parameters()), adamw(alone.parameters())
    for batch in batches(6):
        step(net, optimizer, own(batch))
        step(alone, single, batch)
        average.update_parameters(net)
        expected.update_parameters(alone)
    assert_close(average.module.module, expected.module)
    before = [parameter.detach().clone() for parameter in net.parameters()]
    twin, other = copy.deepcopy(net), copy.deepcopy(alone)
    again, once = adamw(twin.parameters()), adamw(other.parameters())
    for batch in batches(6):
        step(twin, again, own(batch))
        step(other, once, batch)
    assert_close(twin, other)
    for mine, kept in zip(net.parameters(), before, strict=True):
        assert torch.equal(mine, kept)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("shared", ["optimizer", "gradients", "parameters"])
def test_shards_have_one_process_s_values(shared):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    net, alone = two_layers(), two_layers()
    single = adamw(alone.parameters())
    if shared == "optimizer":
        net = DistributedDataParallel(net)
        optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, **OPTIONS)
    else:
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        for part in (net[0], net[2], net):
            fully_shard(part, mesh=mesh, reshard_after_forward=shared == "parameters")
        optimizer = adamw(net.parameters())
    for batch in batches(6):
        step(net, optimizer, own(batch))
        step(alone, single, batch)
    for mine, wanted in zip(net.parameters(), alone.parameters(), strict=True):
        whole = mine if shared == "optimizer" else mine.full_tensor()
        torch.testing.assert_close(whole, wanted, rtol=1e-10, atol=1e-12)
