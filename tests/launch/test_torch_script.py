"""Scripts for PyTorch that ``python -m collectives.torch`` runs over MPI."""

import subprocess
import sys

import pytest

from collectives.torch import NAME
from collectives.torch.__main__ import main
from collectives.torch.register import register
from tests.launch.programs import needs_launcher, needs_torch, run, run_text

pytestmark = [needs_launcher, needs_torch]
SCRIPT = """
import os, sys
import torch, torch.distributed as dist
dist.init_process_group({backend})
def group():
    cpu = torch.device("cpu")
    return dist.group.WORLD._get_backend(cpu).name()
rank = dist.get_rank()
assert rank == int(os.environ["RANK"]) and dist.is_mpi_available()
total = torch.ones(1) * (rank + 1)
dist.all_reduce(total)
if rank == 0:
    print("total", total.item(), group(), *sys.argv[1:], __name__)
{then}
dist.destroy_process_group()
"""


def started(tmp_path, backend="", then="", ranks=2, options=()):
    before = ("-m", "collectives.torch", *options)
    text = SCRIPT.format(backend=backend, then=then)
    return run_text(tmp_path, text, "--lr", 1, before=before, ranks=ranks)


#: A group of Gloo's beside ours, and one of Gloo's alone. A forked process leaves the messages
#: under way alone; work that nobody waits for ends.
PEACEFUL = """
beside = dist.new_group(backend="gloo")
dist.all_reduce(total, group=beside)
assert total.item() == 6

import atexit
work = dist.irecv(total, 1 - rank)
if (child := os.fork()) == 0: atexit._run_exitfuncs(); os._exit(0)
assert os.waitpid(child, 0)[1] == 0
dist.send(torch.ones(1), 1 - rank); work.wait()

if rank == 0:
    own = dist.new_group([0], backend=dist.Backend.MPI, use_local_synchronization=True)
    dist.all_reduce(one := torch.ones(1), group=own)
    assert one.item() == 1

dist.destroy_process_group()
dist.init_process_group("gloo")
dist.all_reduce(total)
assert total.item() == 2 and group() == "gloo"
dist.destroy_process_group()

dist.init_process_group()
for _ in range(20): dist.all_reduce(torch.ones(1000), async_op=True)
sys.exit(0)
"""


def test_groups_of_gloo_stand_beside_mpi_and_the_launcher_says_what_it_changes(tmp_path):
    for _ in range(5):
        done = started(tmp_path, then=PEACEFUL, options=["--explain"])
        # Gloo's thread may hold a tensor when Python ends, and abort; under torchrun, too.
        if "terminate called without an active exception" not in done.stderr:
            break
    assert done.returncode == 0, done.stderr
    assert f"total 3.0 {NAME} --lr 1 __main__\n" in done.stdout
    assert 'The backend "mpi" is this one' in done.stdout
    assert done.stdout.count("MASTER_ADDR") == 1


#: Wherever a script names Gloo, and what torch has for Gloo alone.
NAMES_GLOO = """
assert dist.get_backend() == BACKEND
beside = dist.new_group([0, 1], backend="GLOO")
dist.all_reduce(total, group=beside)
both = dist.new_group(backend="cpu:gloo,cuda:gloo")
dist.all_reduce(total, group=both)
assert total.item() == 12
assert {dist.get_backend(each) for each in (beside, dist.group.WORLD)} == {BACKEND}
assert dist.get_backend(both) == "cpu:" + BACKEND + ",cuda:" + BACKEND
for each in (None, beside):
    dist.monitored_barrier(each, timeout=60.0, wait_all_ranks=True)
"""


#: Backend that a script names, the launcher's options, the name that it then has, whose group it is
#: (nobody's: each rank fails), and how often it is told how to go over MPI.
NAMED = [
    ("mpi", [], "mpi", NAME, 0),
    ("collectives", [], "collectives", NAME, 0),
    ("gloo", [], "gloo", "gloo", 1),
    ("gloo", ["--replace", "gloo"], "mpi", NAME, 0),
    ("nccl", [], "nccl", None, 1),  # without a GPU
]


@pytest.mark.slow
@pytest.mark.parametrize(("named", "options", "backend", "group", "told"), NAMED)
def test_a_script_that_names_another_backend_is_told_once_how_to_go_over_mpi(
    tmp_path, named, options, backend, group, told
):
    then = NAMES_GLOO.replace("BACKEND", repr(backend)) if named == "gloo" else ""
    done = started(tmp_path, repr(named), then, options=options)
    assert (done.returncode == 0) == (group is not None), done.stderr
    assert done.stdout == (f"total 3.0 {group} --lr 1 __main__\n" if group else "")
    times = done.stderr.count(f"collectives.torch --replace {named} {tmp_path}/program.py")
    assert times == told if group else times


def test_a_name_that_torch_does_not_know_is_not_replaced(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["collectives.torch", "--replace", "gluu", __file__])
    with pytest.raises(SystemExit) as ended:
        main()
    told = capsys.readouterr().err
    assert ended.value.code == 2 and "gluu" in told and "gloo" in told and told.count("\n") == 1


#: Rank 1 is late in each step; the others wait in C++, in another thread, or by hand.
SLOW = """
import threading, time
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
nets = [torch.nn.Sequential(torch.nn.Linear(200, 200), torch.nn.Linear(200, 200)) for _ in range(2)]
nets = [DistributedDataParallel(nets[0]), fully_shard(nets[1])]
def message():
    dist.send(total, 1) if rank == 0 else dist.recv(total)
for step in range(6):
    for net in nets:
        loss = net(torch.ones(4, 200)).sum()
        time.sleep(0.2 if rank else 0.01)
        loss.backward()
    work = dist.all_reduce(total, async_op=True)
    work.wait()
    thread = threading.Thread(target=message)
    thread.start(); thread.join()
work = dist.isend(total, 1) if rank == 0 else dist.irecv(total, 0)
work.wait(timeout=__import__("datetime").timedelta(seconds=60))
"""


@pytest.mark.slow
def test_a_profile_names_the_slow_rank_and_where_the_others_wait_for_it(tmp_path):
    done = started(tmp_path, then=SLOW, options=["--profile"])
    assert done.returncode == 0, done.stderr
    first, *table = done.stderr.partition("Rank ")[2].splitlines()
    script = (tmp_path / "program.py").read_text().splitlines()
    sites = {
        line.split("   ")[-1].strip(): line.split() for line in table if " at program.py:" in line
    }

    def site(call, text):
        line = next(n for n, own in enumerate(script, 1) if text in own)
        return sites[f"{call} at program.py:{line}"]

    assert first.startswith("1 "), done.stderr
    sums = site("all_reduce", "loss.backward()")
    assert sums[0] == "12" and float(sums[4].rstrip("%")) > 20  # one bucket a step, on each rank
    assert sums[1] == f"{12 * 4 * 2 * 200 * 201:.3g}"
    for call, text in (
        ("reduce_scatter_single", "loss.backward()"), ("all_gather_single", "loss = net"),
        ("all_reduce", "async_op=True"), ("recvAnySource", "dist.recv(total)"),
    ):  # fmt: skip
        assert site(call, text), call


TWO = "groups = [dist.new_group() for _ in range(2)]\n"
#: Code of a script, its exit status, and what is said; tests/launch/test_failures.py has most of
#: the errors without torch.
ENDS = {
    "error of all": ('raise ValueError("here")', 1, "ValueError: here"),
    "status of all": ("sys.exit(3)", 3, ""),
    "status of one": ("if rank: sys.exit(3)\ndist.barrier()", 3, ""),
    "exit": ("if rank: sys.exit()\ndist.barrier()", 1, "barrier"),
    "interrupt": ("""
import signal, threading, time
if rank: threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
work = dist.barrier(async_op=True)
if rank == 0: time.sleep(1)
work.wait(); dist.barrier(); time.sleep(2); dist.barrier()
""", 1, "KeyboardInterrupt"),
    # In seconds; without a report they would wait for ever.
    "groups in two orders": (
        TWO + "for g in groups[:: 1 - 2 * rank]: dist.destroy_process_group(g)",
        1, "the end of the group",
    ),
    "groups whose names ranks do not share": ("""
local = {"use_local_synchronization": True}
if rank: [dist.new_group([1], **local) for _ in range(2)]
[dist.new_group([0, 1], **local) for _ in range(2)]
""", 0, ""),
    # A rank with a call in the background may be late to another.
    "calls in the background": (TWO + """
import time
if rank:
    work = dist.barrier(groups[1], async_op=True)
    time.sleep(8)
for g in groups:
    if rank and g is groups[1]:
        work.wait()
    else:
        dist.barrier(g)
""", 0, ""),
    "a message that never comes, on one rank": (
        "dist.irecv(torch.ones(1), 0)\nsys.exit(3)", 3, "", 1,
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("what", ENDS)
def test_the_exit_status_is_that_of_the_rank_that_fails(tmp_path, what):
    then, status, said, *ranks = ENDS[what]
    done = started(tmp_path, "", then, *ranks)
    assert done.returncode == status, done.stderr
    assert said in done.stderr


@pytest.mark.slow
def test_a_rank_that_makes_no_group_is_missed(tmp_path):
    late = "import time\nif rank: time.sleep(60)\ndist.new_group()"
    done = started(tmp_path, "timeout=__import__('datetime').timedelta(seconds=2)", late)
    assert done.returncode != 0 and "missing: rank 1" in done.stderr, done.stderr


def test_a_missing_script_is_one_sentence(tmp_path):
    done = run(tmp_path, "-m", "collectives.torch", "missing.py")
    assert done.returncode == 2 and "missing.py" in done.stderr and "Traceback" not in done.stderr


def test_a_machine_without_torch_is_one_sentence():
    lines = (
        "import runpy, sys; sys.modules['torch'] = None\n"
        "sys.argv[1:] = ['-m', 'this']; runpy.run_module('collectives.torch', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "PyTorch is not installed; pip install torch brings it" in done.stderr


def test_torch_knows_the_backend_and_starts_no_mpi():
    lines = (
        "import sys, torch.distributed as dist\n"
        "assert 'collectives' in dist.Backend.backend_list\n"
        "assert 'mpi4py.MPI' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", lines], check=True)


def test_an_old_torch_is_refused_with_the_version_that_is_needed(monkeypatch):
    import torch

    monkeypatch.setattr(torch, "__version__", "2.4.1+cpu")
    with pytest.raises(RuntimeError, match=r"need torch 2\.9, and this one is 2\.4"):
        register()


@pytest.mark.slow
def test_a_group_whose_ranks_torch_numbers_otherwise_is_refused(tmp_path):
    lines = (
        "import os, sys\n"
        "from mpi4py import MPI\n"
        "world = MPI.COMM_WORLD\n"
        "os.environ.update(RANK=str(1 - world.rank), WORLD_SIZE='2', MASTER_ADDR='127.0.0.1')\n"
        "os.environ['MASTER_PORT'] = str(world.bcast(20000 + os.getpid() % 10000))\n"
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "dist.new_group([0, 1], backend='collectives')\n"
    )
    done = run(tmp_path, "-c", lines, ranks=2)
    assert done.returncode != 0
    assert "torch calls this process rank" in done.stderr
