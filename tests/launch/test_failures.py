"""One rank in trouble must end the whole job, soon, with its own words first."""

import socket
from itertools import product
from pathlib import Path
from textwrap import dedent

import pytest

from tests.cases import mostly_slow, slow_case
from tests.launch.programs import DIGITS, needs_launcher, run_text
from tests.processes import running, until

pytestmark = needs_launcher
PREAMBLE = """
    import os, signal, sys, time
    import numpy as np
    from mpi4py import MPI
    from collectives import Communicator
    from collectives.failure.abort import abort_on_exception
    comm = Communicator(MPI.COMM_WORLD)
"""


def job(folder, body, ranks=2):
    """The completed job of a program that starts with ``PREAMBLE``; 60 s at most."""
    return run_text(folder, dedent(PREAMBLE) + dedent(body), ranks=ranks, seconds=60)


REASON = ["[rank 1 of 2 on ", "KeyError: 'the reason'"]
#: By what happens to one rank: the job's exit status ("any" but 0), what is said, the program.
ENDS = {
    "an exception": ("any", REASON, """
        with abort_on_exception(comm):
            if comm.rank == 1:
                raise KeyError("the reason")
            comm.Barrier()
        """),
    # As torch.distributed has one, which writes what it has after the hook before it.
    "a traceback that another hook keeps back": ("any", REASON, """
        import io
        before = sys.excepthook

        def keeping(*given):
            written, sys.stderr = sys.stderr, io.StringIO()
            before(*given)
            written.write(sys.stderr.getvalue())

        sys.excepthook = keeping
        if comm.rank == 1:
            raise KeyError("the reason")
        comm.Barrier()
        """),
    "with no guard but the communicator itself": ("any", [*REASON, "program.py"], """
        if comm.rank == 1:
            raise KeyError("the reason")
        comm.Allreduce(np.ones(1000), np.zeros(1000), algorithm="ring")
        """),
    "in a thread": ("any", REASON, """
        from threading import Thread

        def work():
            if comm.rank == 1:
                raise KeyError("the reason")
            comm.Barrier()

        thread = Thread(target=work)
        thread.start()
        thread.join()
        comm.Barrier()
        """),
    "an exit where the others wait": (
        1, [REASON[0], "SystemExit: 0", "wait for this one, so that the job ends here"], """
        from mpitrain.ranks.together import all_or_nobody
        with all_or_nobody(comm, 0.5):
            if comm.rank == 1:
                sys.exit(0)
            comm.Barrier()
        """),
    # A class that all ranks raise together elsewhere, while a checkpoint is being written.
    "an error that looks like one of all": (
        "any", ["ConfigError: of one rank", "The other ranks have not failed within 5 s"], """
        import mpitrain
        from mpitrain import nn

        def fails(parts):
            if parts.steps_done == 3 and comm.rank == 1:
                raise mpitrain.ConfigError("of one rank")

        mpitrain.Trainer(
            comm=comm, model={"linear": nn.Linear(3, 1)},
            train_data=[(np.ones(3, "f4"), np.ones(1, "f4"))] * 24,
            loss="mean_squared_error", batch_size=6, epochs=2, dir="run",
            checkpoint={"every": 1}, before_step=fails,
        ).fit()
        """),
    "a status where no file can be opened any more": (3, [], """
        import resource
        with abort_on_exception(comm):
            if comm.rank == 1:
                resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
                sys.exit(3)
            comm.Barrier()
        """),
}  # fmt: skip
#: One raised by a rank, in a thread, where nobody guards it, and one that ends without an error.
COMMON = ("an exception", "in a thread", "with no", "an exit")


@pytest.mark.parametrize("what", mostly_slow(ENDS, lambda what: what.startswith(COMMON)))
def test_the_trouble_of_one_rank_ends_the_job(tmp_path, what):
    status, said, body = ENDS[what]
    ended = job(tmp_path, body)
    assert ended.returncode if status == "any" else ended.returncode == status
    assert all(words in ended.stderr for words in said), ended.stderr
    assert "rank 0 of" not in ended.stderr or what != "an exception"


def test_an_error_of_one_rank_that_it_catches_ends_the_job(tmp_path):
    ended = job(
        tmp_path,
        """
        from mpitrain.ranks.together import all_or_nobody
        for ranks in (range(2), [1]):
            try:
                with all_or_nobody(comm, 10 if len(ranks) == 2 else 0.5):
                    if comm.rank in ranks:
                        raise ValueError(f"of {len(ranks)} ranks")
                    comm.Barrier()
            except ValueError as error:
                print(f"caught: {error}", flush=True)
        """,
    )
    assert ended.returncode != 0
    assert ended.stdout.count("caught: of 2 ranks") == 2
    assert "caught: of 1" not in ended.stdout
    assert "[rank 1 of 2 on " in ended.stderr and "ValueError: of 1 ranks" in ended.stderr
    assert "The other ranks have not failed within 0.5 s" in ended.stderr


CUT = """
import os, sys
from mpitrain.__main__ import main
from mpitrain.training.step import SynchronousLoop

step = SynchronousLoop.step

def cut(self, *arguments):
    if self.parts.steps_done == 2:
        os.truncate("data.txt", 0)
    return step(self, *arguments)

SynchronousLoop.step = cut
sys.exit(main(["train", "job.toml"]))
"""
JOB = """
[run]
log_every = 1
[data]
name = "text"
path = "data.txt"
units = "bytes"
context = 8
[model]
kind = "gpt"
width = 8
heads = 1
layers = 1
[train]
batch_size = 4
"""


def test_a_file_of_data_that_is_cut_while_it_is_mapped(tmp_path):
    """The rank that reads it is killed by SIGBUS; it says where it was."""
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "data.txt").write_bytes(bytes(100_000))
    ended = run_text(tmp_path, CUT, seconds=60)
    assert ended.returncode not in (0, 1)
    assert "Fatal Python error: Bus error" in ended.stderr
    assert "data/text.py" in ended.stderr


ALONE = """
import sys
from mpi4py import MPI
from mpitrain.__main__ import main
from mpitrain.pipeline.stage import Stage
from mpitrain.training.batches import MicroBatches

where, calls = sys.argv.pop(1), []
kind = MicroBatches if where == "loss" else Stage
usual = getattr(kind, where)

def fails(self, *arguments):
    calls.append(where)
    if len(calls) > 5 and MPI.COMM_WORLD.rank == MPI.COMM_WORLD.size - 1:
        raise ArithmeticError(f"the {where} of one rank")
    return usual(self, *arguments)

setattr(kind, where, fails)
sys.exit(main(["train", "job.toml"]))
"""


@pytest.mark.parametrize(
    ("where", "ranks", "layout"),
    [
        slow_case("forward", 2, ""),
        slow_case("backward", 2, "pipe = 2"),
        slow_case("loss", 4, "pipe = 2"),
        ("backward", 2, "zero = 1"),
    ],
)
def test_an_error_in_a_pass_of_one_rank_ends_all_ranks(tmp_path, where, ranks, layout):
    (tmp_path / "job.toml").write_text(f"{DIGITS.format(steps=40, hidden=8)}[parallel]\n{layout}\n")
    ended = run_text(tmp_path, ALONE, where, ranks=ranks, seconds=60)
    assert ended.returncode not in (0, 124)
    assert f"ArithmeticError: the {where} of one rank" in ended.stderr


@pytest.mark.parametrize(
    "end", [slow_case("comm.Abort(5)"), "os.kill(os.getpid(), signal.SIGKILL)"]
)
def test_a_dead_rank_leaves_no_shared_memory(tmp_path, end):
    ended = job(
        tmp_path,
        f"""
        window = comm.empty(1 << 20, float)
        window[...] = comm.rank
        comm.Allreduce(MPI.IN_PLACE, window, algorithm="direct")
        with open("/proc/self/maps") as maps:  # tests beside this one have files there, too
            mapped = {{line.split()[-1] for line in maps if "/dev/shm/" in line}}
        open(f"{tmp_path}/mapped.{{comm.rank}}", "w").write("\\n".join(mapped))
        comm.Barrier()
        if comm.rank == 1:
            {end}
        comm.Allreduce(MPI.IN_PLACE, window, algorithm="direct")
        """,
    )
    assert ended.returncode != 0
    lists = list(tmp_path.glob("mapped.*"))
    assert len(lists) == 2
    mapped = [Path(name) for names in lists for name in names.read_text().splitlines()]
    # MPICH leaves the files of its own channel behind.
    ours = [path for path in mapped if not path.name.startswith("mpich_shm_")]
    assert until(lambda: not any(path.exists() for path in ours)), ours


WATCHED = """
comm = Communicator(MPI.COMM_WORLD, timeout=2)
items = np.ones(100, np.float32)
comm.Allreduce(MPI.IN_PLACE, items, algorithm="ring")
window = comm.empty(9, float)

def elsewhere():
    if comm.rank == 1:
        {trouble}

elsewhere()
{call}
"""
STALLS = {
    "busy": ("time.sleep(50)", "has completed 2, is in none of them"),
    "stopped": ("os.kill(os.getpid(), signal.SIGSTOP)", "does not answer: it is stopped"),
}
WAITS = {
    "blocking": 'comm.Allreduce(MPI.IN_PLACE, items, algorithm="ring")',
    "native": 'comm.Allreduce(MPI.IN_PLACE, items, algorithm="native")',
    "barrier": "comm.Barrier()",
    "shared": "comm.Allreduce(MPI.IN_PLACE, window, algorithm='direct')",
    "close": 'comm.Iallreduce(MPI.IN_PLACE, items, algorithm="ring"); comm.close()',
    "plan": 'comm.Iallreduce(MPI.IN_PLACE, items, algorithm="ring").Wait()',
}
# One wait each in a plan and in shared memory.
QUICK = {("plan", "stopped"), ("shared", "busy")}


@pytest.mark.parametrize(("call", "trouble"), mostly_slow(product(WAITS, STALLS), QUICK))
def test_a_rank_that_does_not_come_is_named(tmp_path, trouble, call):
    doing, told = STALLS[trouble]
    ended = job(tmp_path, WATCHED.format(trouble=doing, call=WAITS[call]))
    assert ended.returncode != 0
    assert ended.stderr.count("has not ended after 2 s") == 1
    assert f"rank 1 {told}" in ended.stderr.replace(f" on {socket.gethostname()}", "")
    assert "missing: rank 1\n" in ended.stderr
    assert "program.py" in ended.stderr.partition("rank 0 is here:")[2]
    assert ("in elsewhere" in ended.stderr) == (trouble == "busy")


POLLS = """
comm = Communicator(MPI.COMM_WORLD, timeout=2)
items = np.ones(100, np.float32)

def complete(plan):
    if comm.rank:
        return plan.Wait()
    while not plan.Test():
        time.sleep(0.01)

complete(comm.Iallreduce(MPI.IN_PLACE, items, algorithm="ring"))
if comm.rank == 1:
    time.sleep(50)
"""
LATE = "the ranks' collective number 2 has not ended after 2 s"
#: Ranks, whether they end well, what is said in this order, what is not, and the program.
REPORTS = {
    "a rank that polled where another waited": (
        2, False, [LATE, "rank 0 has completed 1, is in #2 barrier", "missing: rank 1\n"],
        "missing: rank 0", POLLS + "comm.Barrier()",
    ),
    "a rank that polls where another waits": (
        3, False, [LATE, "rank 0 has completed 1, is in none of them: it polls with Test",
                   "missing: rank 1\n"],
        "missing: rank 0",
        POLLS + "complete(comm.Iallreduce(MPI.IN_PLACE, items, algorithm='ring'))",
    ),
    "the job's numbers of a group's ranks": (
        4, False,
        ["collective number 2 of ranks 1, 3 has not ended after 2 s; rank 1: #2 barrier",
         "rank 3 has completed 1, is in none of them", "missing: rank 3\n", "rank 3 is here:"],
        "missing: rank 1", """
        half = Communicator(MPI.COMM_WORLD.Split(MPI.COMM_WORLD.rank % 2), timeout=2)
        half.Barrier()
        if MPI.COMM_WORLD.rank == 3:
            time.sleep(50)
        half.Barrier()
        """,
    ),
    "a rank that is stuck in MPI": (
        4, True,
        ["[rank 1 of 4] the last 64 collective calls, oldest first:",
         "#9 allreduce ring 400 bytes at ", "#71 allgather of objects at ",
         "#72 allreduce native 400 bytes", "under way for"],
        "#8 ", """
        comm = Communicator(MPI.COMM_WORLD, timeout=100)
        items = np.ones(100, np.float32)
        for _ in range(70):
            comm.Allreduce(MPI.IN_PLACE, items, algorithm="ring")
        pids = comm.allgather(os.getpid())
        if comm.rank == 0:
            time.sleep(1)
            os.kill(pids[1], signal.SIGUSR2)
            time.sleep(1)
        comm.Allreduce(MPI.IN_PLACE, items, algorithm="native")
        """,
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", mostly_slow(REPORTS, [*REPORTS][:1]))
def test_reports_have_the_last_calls_and_who_is_missing(tmp_path, what):
    ranks, ends_well, said, never, body = REPORTS[what]
    ended = job(tmp_path, body, ranks)
    assert (ended.returncode == 0) == ends_well, ended.stderr
    places = [ended.stderr.find(words) for words in said]
    assert min(places) >= 0 and places == sorted(places), ended.stderr
    assert never not in ended.stderr
    for words in (" has not ended after 2 s", "missing: "):
        assert ended.stderr.count(words) == (not ends_well)


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), signal.SIGKILL)", slow_case("os._exit(0)")])
def test_a_rank_that_dies_is_seen_by_its_neighbours(tmp_path, end):
    program = f"""
        comm = Communicator(MPI.COMM_WORLD, timeout=20)
        another = Communicator(MPI.COMM_WORLD, timeout=20)
        ones = np.ones(10)
        comm.Allreduce(MPI.IN_PLACE, ones, algorithm="ring")
        if comm.rank == 1:
            {end}
        while True:
            comm.Allreduce(MPI.IN_PLACE, ones, algorithm="ring")
        """
    died = f"saw rank 1 on {socket.gethostname()} die"
    seen = [0]
    for _ in range(4):  # the launcher may kill those that saw it before they can tell
        ended = job(tmp_path, program, ranks=3)
        # MPICH's launcher returns 0 if the dead rank did.
        assert ended.returncode != 0 or "_exit(0)" in end
        seen = [ended.stderr.count(f"rank {rank} {died}") for rank in (0, 2)]
        if any(seen):
            break
    assert max(seen) == 1, ended.stderr


def test_ranks_end_with_the_launcher_of_their_node(tmp_path):
    """MPICH's go on for ever otherwise, and mpiexec waits for them."""
    ended = job(
        tmp_path,
        """
        ones = np.ones(10_000)
        with abort_on_exception(comm):
            comm.Allreduce(MPI.IN_PLACE, ones, algorithm="ring")
            if comm.rank == 1:
                os.kill(os.getppid(), signal.SIGKILL)
            while True:
                comm.Allreduce(MPI.IN_PLACE, ones, algorithm="ring")
        """,
    )
    assert ended.returncode != 0
    program = str(tmp_path / "program.py")
    assert until(lambda: not running(program)), running(program)
