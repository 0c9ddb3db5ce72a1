"""Gradients of torch's DistributedDataParallel by codes, as a communication hook."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from collectives.torch.backend import backend_of
from collectives.torch.register import register
from mpitrain.adapters.torch import Compression, compression_hook

pytestmark = pytest.mark.at_most(5)
P, RANK = MPI.COMM_WORLD.size, MPI.COMM_WORLD.rank


@pytest.fixture(autouse=True)
def group():
    register()
    dist.init_process_group("collectives", "mpi://")
    yield backend_of(dist.group.WORLD)
    dist.destroy_process_group()


def module():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(40, 48), nn.Tanh(), nn.Linear(48, 30)).double()


def batch(rank, step):
    drawn = torch.Generator().manual_seed(100 * step + rank)
    return (torch.randn(8, size, generator=drawn).double() for size in (40, 30))


def backward(replica, step, factor=1.0):
    inputs, labels = batch(RANK, step)
    (nn.functional.mse_loss(replica(inputs), labels) * factor).backward()


def hooked(replica, codec, **how):
    hook = Compression(replica, codec, least=1, **how)
    replica.register_comm_hook(hook, compression_hook)
    return hook


def replicas(net, bucket_bytes=4096, **how):
    """Replicas whose buckets stay as they are, so that the first pass is coded, too."""
    how = {"find_unused_parameters": True, **how}
    return DistributedDataParallel(net, bucket_cap_mb=bucket_bytes / 2**20, **how)


def run(net, steps, codec=None, state=None, first=0, **how):
    """Gradients of each step, and what the hook remembers after them."""
    found, kept, replica = [], {}, replicas(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    hook = codec and hooked(replica, codec, **how)
    if state is not None:
        hook.load_state_dict(state)
    for step in range(first, first + steps):
        optimizer.zero_grad()
        backward(replica, step)
        found.append(torch.cat([p.grad.flatten().clone() for p in net.parameters()]).numpy())
        optimizer.step()
    if hook:
        kept = hook.state_dict()
        hook.close()
    return np.array(found), kept


@pytest.mark.parametrize("codec", ["topk:keep=1", "powersgd:rank=99,min_rate=0"])
def test_codes_that_leave_nothing_out_give_the_mean(codec):
    expected, _ = run(module(), 3)
    found, _ = run(module(), 3, codec)
    np.testing.assert_allclose(found, expected, rtol=1e-7, atol=1e-12)


@pytest.mark.parametrize("codec", ["int8", "signum", "dgc:keep=0.1", "powersgd:rank=2"])
def test_replicas_stay_equal_and_a_loop_goes_on_bit_by_bit(comm, codec):
    expected, _ = run(module(), 5, codec, start=0)
    assert len({one.tobytes() for one in comm.allgather(expected)}) == 1
    dense, _ = run(module(), 1)
    assert not np.array_equal(dense[0], expected[0])
    found, kept = run(net := module(), 3, codec)
    rest, _ = run(net, 2, codec, state=kept, first=3)
    np.testing.assert_array_equal([*found, *rest], expected)
    assert int(kept["steps"]) == 3


@pytest.mark.parametrize("codec", ["topk:keep=0.25", "int8", "powersgd:rank=2"])
def test_nothing_left_out_is_lost_while_no_rank_uses_a_tensor(comm, codec):
    a, b = (nn.Linear(12, 16, bias=False).double() for _ in range(2))
    replica = replicas(net := nn.ModuleList([a, b]), 1 << 20)
    net.forward = lambda x, both: (a(x).square() + (b(x).square() if both else 0)).sum()
    hook = hooked(replica, codec, feedback="on")
    inputs = torch.randn(4, 12, generator=torch.Generator().manual_seed(RANK)).double()
    got, expected = np.zeros(2), np.zeros(2)
    for both in (True, False, False, True, False):
        net.zero_grad()
        replica(inputs, both).backward()
        gradients = torch.autograd.grad(net.forward(inputs, both), [a.weight, b.weight][: 1 + both])
        for i, gradient in enumerate(gradients):
            got[i] += float((a, b)[i].weight.grad.sum())
            expected[i] += comm.allreduce(float(gradient.sum())) / P
        assert both or b.weight.grad is None
    left = sum(float(v.sum()) for name, v in hook.state_dict().items() if name[:2] in ("re", "ow"))
    hook.close()
    np.testing.assert_allclose(got.sum() + comm.allreduce(left), expected.sum(), rtol=1e-9)


def test_a_gradient_that_is_no_number_on_one_rank_is_none_on_all(comm):
    replica = replicas(net := module())
    hook = hooked(replica, "int8", feedback="on")
    for step in range(3):
        before = hook.state_dict()
        net.zero_grad()
        backward(replica, step, float("nan") if step == 1 and comm.rank == P - 1 else 1.0)
        finite = [bool(p.grad.isfinite().all()) for p in net.parameters()]
        assert comm.allgather(finite) == [[step != 1] * 4] * P
        after = hook.state_dict()
        if step == 1:
            same = [torch.equal(after[k], before[k]) for k in before if k != "steps"]
            assert same and all(same)
    assert after.keys() > {"steps"}
    hook.close()


def test_what_was_loaded_is_not_lost_without_a_word():
    _, kept = run(module(), 1, "powersgd:rank=2")
    hook = hooked(replicas(module()), "powersgd:rank=2")
    hook.load_state_dict(kept)
    again = hook.state_dict()  # before a backward pass
    torch.testing.assert_close(again, kept, rtol=0, atol=0)
    for bucket_bytes, codec in ((1 << 20, "powersgd:rank=2"), (4096, "bf16")):
        replica = replicas(module(), bucket_bytes)
        hooked(replica, codec).load_state_dict(kept)
        with pytest.raises(RuntimeError, match=r"state of .* (was loaded|has shape)"):
            for step in range(2):
                backward(replica, step)


@pytest.mark.parametrize("static", [False, True])
def test_passes_are_dense_until_torch_has_made_its_buckets_anew(static):
    net = replicas(made := module(), find_unused_parameters=False, static_graph=static)
    state = hooked(net, "signum")
    alone = module()
    for step in range(4):
        net.zero_grad()
        alone.zero_grad()
        backward(net, step)
        for rank in range(P):
            inputs, labels = batch(rank, step)
            (nn.functional.mse_loss(alone(inputs), labels) / P).backward()
        pairs = zip(made.parameters(), alone.parameters(), strict=True)
        is_dense = all(torch.allclose(mine.grad, other.grad) for mine, other in pairs)
        assert is_dense == (step <= static)
    state.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gradients_of_sixteen_bits_are_coded(comm, dtype):
    def gradients(codec):
        replica = replicas(net := module().to(dtype))
        state = codec and hooked(replica, codec)
        inputs = next(iter(batch(RANK, 0))).to(dtype)
        for _ in range(2):
            net.zero_grad()
            replica(inputs).square().mean().backward()
        if state:
            state.close()
        return torch.cat([p.grad.flatten() for p in net.parameters()])

    dense, whole, coarse = (gradients(codec) for codec in (None, "topk:keep=1", "int8"))
    torch.testing.assert_close(whole, dense, rtol=2.0**-6, atol=1e-4)
    assert not torch.equal(coarse, dense)
    torch.testing.assert_close(coarse, dense, rtol=0.1, atol=0.02)
    assert len(set(comm.allgather(coarse.float().numpy().tobytes()))) == 1
