"""Communication hooks of one's own, in the manner of torch's."""

import threading

import numpy as np
import pytest
from mpi4py import MPI

torch = pytest.importorskip("torch", reason="torch is not installed: make test TORCH=1")
torch.set_num_threads(1)
pytestmark = [pytest.mark.mpi, pytest.mark.at_most(5)]

from mpitrain.adapters.torch import DistributedDataParallel  # noqa: E402

RANKS, RANK = MPI.COMM_WORLD.size, MPI.COMM_WORLD.rank


def net(**options):
    torch.manual_seed(3)
    module = torch.nn.Sequential(
        torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 16), torch.nn.Linear(16, 1)
    )
    # A bucket for each tensor.
    return DistributedDataParallel(module, bucket_cap_mb=1e-6, **options)


def batch(step, rank=RANK, count=6):
    draw = torch.Generator().manual_seed(step * 100 + rank)
    x = torch.randn(count, 8, generator=draw)
    return x, x.sin().sum(1, keepdim=True)


def backward(replica, step=0, **which):
    """The gradients after a pass over the own batch of a step."""
    x, y = batch(step, **which)
    torch.nn.functional.mse_loss(replica(x), y).backward()
    return [p.grad.clone() for p in replica.parameters()]


def trained(hook=None, steps=4, **options):
    """The gradients of each step, and the parameters."""
    found = []
    replica = net(**options)
    if hook:
        replica.register_comm_hook(replica, hook)
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.05, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        found.append(backward(replica, step))
        optimizer.step()
    replica.close()
    return found, [p.detach().numpy() for p in replica.parameters()]


def expect_equal_ranks(comm, parameters):
    for other in comm.allgather(parameters):
        assert all(np.array_equal(a, b) for a, b in zip(other, parameters))


def plain(net, bucket):
    """torch's allreduce_hook."""
    future = net.all_reduce(bucket.buffer().div_(RANKS))
    return future.then(lambda done: done.value()[0])


def waiting(net, bucket):
    """Waits in the hook itself, also for what comes after."""
    first = net.all_reduce(bucket.buffer().div_(RANKS))
    zeros = net.all_reduce(torch.zeros(2)).then(lambda done: first.wait()[0] + done.wait()[0].sum())
    future = torch.futures.Future()
    future.set_result(zeros.wait())
    return future


def chained(net, bucket):
    """Another sum follows the first one, in one order on all ranks."""

    def again(done):
        return net.all_reduce(done.value()[0].div_(RANKS)).wait()[0]

    return net.all_reduce(bucket.buffer().div_(RANKS)).then(again)


def bf16_compress_hook(net, bucket):
    """torch's, but for the name of the all-reduce."""
    compressed = bucket.buffer().to(torch.bfloat16).div_(RANKS)
    future = net.all_reduce(compressed)

    def decompress(future):
        decompressed = bucket.buffer()
        decompressed.copy_(future.value()[0])
        return decompressed

    return future.then(decompress)


@pytest.mark.parametrize("overlap", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("hook", [plain, waiting, chained])
def test_a_sum_of_ones_own_is_the_sum(comm, hook, overlap):
    expected, _ = trained()
    found, parameters = trained(hook, overlap=overlap)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
    expect_equal_ranks(comm, parameters)


def test_bf16_compression_as_in_torchs_documents(comm):
    """Each gradient is the sum of the ranks' numbers in bfloat16, and equal on all."""
    found, parameters = trained(bf16_compress_hook)
    torch.manual_seed(3)
    module = net().module
    shares = []
    for rank in range(RANKS):
        module.zero_grad()
        shares.append([g.to(torch.bfloat16).div_(RANKS) for g in backward(module, rank=rank)])
    for number, gradient in enumerate(found[0]):
        whole = sum(share[number].double() for share in shares)
        torch.testing.assert_close(gradient.double(), whole, rtol=2**-7 * RANKS, atol=1e-3)
        assert torch.equal(gradient, gradient.to(torch.bfloat16).float())
    expect_equal_ranks(comm, parameters)


def test_what_a_hook_sees():
    seen = []

    def hook(state, bucket):
        (gradient,), (parameter,) = bucket.gradients(), bucket.parameters()
        assert state == "mine"
        assert gradient.shape == parameter.shape
        assert gradient.data_ptr() == bucket.buffer().data_ptr()
        seen.append((bucket.index(), bucket.is_last()))
        own = bucket.buffer().clone()
        bucket.set_buffer(torch.zeros_like(own))
        future = torch.futures.Future()
        future.set_result([own])  # nothing is summed
        return future

    replica = net()
    replica.register_comm_hook("mine", hook)
    found = backward(replica)
    replica.zero_grad()
    backward(replica.module)
    replica.reduce()
    for gradient, parameter in zip(found, replica.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad)
    assert seen == [(n, n == 5) for n in range(6)] * 2
    replica.close()


def test_unequal_batches_and_ranks_that_are_done(comm):
    """weigh and join go on with a hook: the same gradients as without one."""

    def loop(hook):
        replica = net()
        if hook:
            replica.register_comm_hook(replica, hook)
        found = []
        with replica.join():
            for step in range(1 + RANK):
                replica.zero_grad()
                replica.weigh(2 + RANK)
                found.append(backward(replica, step, count=2 + RANK))
        replica.close()
        return found

    torch.testing.assert_close(loop(plain), loop(None), rtol=1e-5, atol=1e-7)


def future_of(value):
    future = torch.futures.Future()
    future.set_result(value)
    return future


def failing(state, bucket):
    raise OSError("no way")


@pytest.mark.parametrize(
    ("hook", "error", "why"),
    [
        (lambda s, b: b.buffer(), TypeError, "returns a Tensor; it must return a torch.futures"),
        (lambda s, b: future_of(None), TypeError, "future gives a NoneType"),
        (lambda s, b: future_of(b.buffer().double()), TypeError, "numbers of torch.float64"),
        (failing, OSError, "no way"),
    ],
)
def test_hooks_that_cannot_be(hook, error, why):
    replica = net()
    replica.register_comm_hook(None, hook)
    for kind, message in (
        (error, why),
        (RuntimeError, r"cannot be used any more: .*its communication hook has"),
    ):
        with pytest.raises(kind, match=message):
            backward(replica)


def unlike(where):
    """A hook that fails on the last rank, at the second bucket."""

    def hook(net, bucket):
        fails = RANK == RANKS - 1 and bucket.index() == 1
        if fails and where == "hook":
            raise OSError("no way")
        future = net.all_reduce(bucket.buffer().div_(RANKS))

        def end(done):
            if fails:
                raise OSError("no way")
            if where == "then":
                return done.value()[0]
            again.append(net.all_reduce(done.value()[0]))  # of which this bucket takes no part
            return again[0].wait()

        again = []
        return future.then(end)

    return hook


@pytest.mark.skipif(RANKS == 1, reason="needs a rank that differs")
@pytest.mark.parametrize("overlap", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("where", ["hook", "then", "chained"])
def test_a_hook_that_fails_on_one_rank_is_an_error_of_all(comm, where, overlap):
    replica = net(overlap=overlap)
    replica.register_comm_hook(replica, unlike(where))
    last = RANK == RANKS - 1
    why = f"rank {RANKS - 1}: its communication hook has failed: OSError: no way"
    with pytest.raises(OSError if last else RuntimeError, match="no way" if last else why):
        backward(replica)
    with pytest.raises(RuntimeError, match=r"cannot be used any more: .*OSError: no way|no way"):
        backward(replica)
    with net() as other:  # others go on
        backward(other)


def test_a_future_may_get_its_value_in_another_thread(comm):
    def hook(state, bucket):
        future = torch.futures.Future()
        threading.Timer(0.02, future.set_result, [bucket.buffer()]).start()
        return future

    replica = net()
    replica.register_comm_hook(None, hook)
    backward(replica)
    replica.close()


def test_what_is_registered_is_the_same_on_all_ranks():
    replica = net()
    with pytest.raises(RuntimeError, match="a communication hook is a function"):
        replica.register_comm_hook(None, 5)
    if RANKS > 1:
        with pytest.raises(ValueError, match="different communication hooks"):
            replica.register_comm_hook(None, plain if RANK else bf16_compress_hook)
    replica.register_comm_hook(replica, plain)
    with pytest.raises(RuntimeError, match="has a communication hook already"):
        replica.register_comm_hook(replica, plain)
    with pytest.raises(TypeError, match="contiguous"):
        replica.all_reduce(torch.ones(4, 4).T)
    replica.close()


def test_sums_at_the_end_of_the_backward_pass_give_the_same_bits():
    (_, early), (_, late) = (trained(steps=5, overlap=overlap) for overlap in (True, False))
    assert all(np.array_equal(a, b) for a, b in zip(early, late, strict=True))
    with pytest.raises(ValueError, match="overlap is True or False, not 'auto'"):
        net(overlap="auto")
