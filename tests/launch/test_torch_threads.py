"""Groups of torch's over an MPI that lets only one thread call it."""

import pytest

from tests.cases import slow_case
from tests.launch.programs import needs_launcher, needs_torch, run_text

pytestmark = [needs_launcher, needs_torch]
SCRIPT = """
import sys, threading
import mpi4py
mpi4py.rc.thread_level = sys.argv[1]
import torch, torch.distributed as dist
from mpi4py import MPI

assert MPI.Query_thread() < MPI.THREAD_MULTIPLE
dist.init_process_group("collectives", "mpi://")
rank, size = dist.get_rank(), dist.get_world_size()

def losses(group):
    torch.manual_seed(0)
    net = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(40, 300), torch.nn.Tanh(), torch.nn.Linear(300, 1)),
        process_group=group, bucket_cap_mb=0.01,
    )
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    draw, found = torch.Generator().manual_seed(rank), []
    for _ in range(3):
        optimizer.zero_grad()
        loss = net(torch.randn(8, 40, generator=draw)).square().mean()
        loss.backward()
        optimizer.step()
        found.append(loss.item().hex())
    return found

if sys.argv[1] == "funneled":  # at the slow level, as DistributedDataParallel imports much
    assert losses(dist.group.WORLD) == losses(dist.new_group(backend="gloo"))
beside = dist.new_group(list(range(size)))

def begun(group=None):
    tensor = torch.ones(3)
    return tensor, dist.all_reduce(tensor, group=group, async_op=True)

# Each rank ends its calls in another way; all of them run in one order.
ones, work = begun()
twos, later = begun(beside)
assert ones.tolist() == twos.tolist() == [1] * 3
if rank == 0:
    assert later.is_completed() and ones.tolist() == twos.tolist() == [size] * 3
else:
    assert later.get_future().wait()[0] is twos and ones.tolist() == [size] * 3
dist.barrier(beside)
assert twos.tolist() == [size] * 3
# A call that blocks runs what came before it.
ones, work = begun()
dist.all_reduce(torch.ones(1), group=beside)
assert ones.tolist() == [size] * 3
# A message waits no longer than its collectives: rank 0's sum runs while it waits for the message.
ones, work = begun()
got = torch.zeros(1)
if rank == 0:
    dist.recv(got, 1)
else:
    work.wait()
    dist.send(torch.ones(1), 0)
work.get_future().then(lambda done: dist.all_reduce(twos)).wait()
assert twos.tolist() == [size * size] * 3
# Nor does a new group wait for them, or a barrier that names who is late.
for waits in (lambda: dist.new_group(list(range(size))), dist.monitored_barrier):
    ones, work = begun()
    if rank == 1:
        work.wait()
    waits()
    assert ones.tolist() == [size] * 3
begun(beside)  # nobody waits
names = {thread.name for thread in threading.enumerate()}
assert "collectives" not in names, names
print("the end", flush=True)
"""


@pytest.mark.parametrize("level", ["serialized", slow_case("funneled")])
def test_calls_run_in_the_program_s_thread(tmp_path, level):
    done = run_text(tmp_path, SCRIPT, level, ranks=2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("the end") == 2
