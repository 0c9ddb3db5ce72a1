"""``auto`` by turns: what ranks with other clocks and other files agree on."""

import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

from collectives import Communicator
from collectives.__main__ import main
from collectives.calls import alternating
from collectives.calls import autotune as turns
from collectives.calls.remembered import where

pytestmark = [pytest.mark.mpi, pytest.mark.quick_on(3)]

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
ITEMS = 1 << 14
#: Of trials: calls until the ranks know.
ALL = len(turns.ORDER)
needs_two = pytest.mark.mpi(min_size=2)


@pytest.fixture(autouse=True)
def files(monkeypatch, tmp_path) -> Path:
    """A cache folder for each rank, as on hosts of their own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / f"cache{RANK}"))
    return where()


@pytest.fixture
def comm() -> Iterator[Communicator]:
    with Communicator(MPI.COMM_WORLD, turns=True) as made:
        yield made


def clock(monkeypatch, native: float, ours: float) -> None:
    """Calls take so long, on this rank."""
    for module in (turns, alternating):
        numbers = count()

        def now(numbers=numbers) -> float:
            number = next(numbers)
            if number % 2 == 0:
                return 0.0
            return native if turns.ORDER[number // 2 % ALL] == "native" else ours

        monkeypatch.setattr(module, "perf_counter", now)


def run(comm: Communicator, calls: int = ALL + 2) -> list[str]:
    """The algorithms of some calls, which all ranks must see alike."""
    mine, total, taken = np.zeros(ITEMS), np.zeros(ITEMS), []
    for call in range(calls):
        mine[:] = RANK + call
        total[:] = -1
        comm.Allreduce(mine, total)
        assert (total == SIZE * (SIZE - 1) / 2 + SIZE * call).all()
        taken.append(comm.last_plan.algorithm)
    assert MPI.COMM_WORLD.allgather(taken) == [taken] * SIZE
    return taken


@needs_two
@pytest.mark.parametrize(
    ("native", "ours", "kept", "after"),
    [
        (lambda rank: 2.0, lambda rank: 1.0, "butterfly", ALL),
        (lambda rank: 1.0, lambda rank: 2.0, "native", ALL),
        # Rank 0 finds ours faster; the last rank, that it is twice as slow as native for anybody.
        (lambda rank: 3.0, lambda rank: 1.0 + 5.0 * (rank == SIZE - 1), "native", ALL),
        (lambda rank: 9.0, lambda rank: 1.0, "butterfly", 4),  # hopeless: no more calls of it
        (lambda rank: 1.0, lambda rank: 9.0, "native", 4),
        (lambda rank: 1.0, lambda rank: 9000.0, "native", 4),
    ],
)
def test_ranks_keep_what_is_faster_for_all(comm, monkeypatch, files, native, ours, kept, after):
    clock(monkeypatch, native(RANK), ours(RANK))
    taken = run(comm)
    tried = ["native" if turn == "native" else "butterfly" for turn in turns.ORDER[:after]]
    assert taken == [*tried, *[kept] * (len(taken) - after)]
    words = "as before" if kept == "native" else "by turns: butterfly"
    assert comm.last_plan.reason.startswith(words)
    assert files.exists() == (RANK == 0)
    if RANK == 0:
        (found,) = json.loads(files.read_text())["kept"]
        assert (found["algorithm"], found["ours"]) == (kept, "butterfly")
        assert found["ratio"] > 0  # a ratio of 0 would make the file unreadable


@needs_two
def test_rank_0_remembers_for_all(comm, monkeypatch, files):
    """The others have no file, or one that says something else."""
    clock(monkeypatch, 2.0, 1.0)
    run(comm)
    written = MPI.COMM_WORLD.bcast(files.read_text() if RANK == 0 else "")
    if RANK == SIZE - 1 and RANK:
        files.parent.mkdir(parents=True)
        files.write_text(written.replace('"algorithm": "butterfly"', '"algorithm": "native"'))
    with Communicator(MPI.COMM_WORLD, turns=True) as other:
        assert run(other, 2) == ["butterfly"] * 2
        assert "remembered: butterfly 2.00x native" in other.last_plan.reason


@needs_two
@pytest.mark.parametrize(
    "content", [b"", b"{", b'{"version": 7, "kept": []}', b"\xff\x00", b'{"version": 1, "kept": 3}']
)
def test_a_file_that_cannot_be_read_has_nothing(comm, monkeypatch, files, caplog, content):
    files.parent.mkdir(parents=True)
    files.write_bytes(content)
    clock(monkeypatch, 2.0, 1.0)
    assert run(comm)[-1] == "butterfly"
    assert RANK or "turns --forget removes it" in caplog.text


@needs_two
def test_a_folder_that_cannot_be_written_is_no_error(comm, monkeypatch, files, caplog):
    files.parent.parent.mkdir(parents=True)
    files.parent.write_text("in the way")
    clock(monkeypatch, 2.0, 1.0)
    assert run(comm)[-1] == "butterfly"
    assert RANK or "is not remembered" in caplog.text


@needs_two
def test_sums_that_must_repeat_are_not_tried(files):
    with Communicator(MPI.COMM_WORLD, turns=True, reproducible=True) as comm:
        run(comm, 3)
        for kind, name in ((float, "MAX"), (int, "SUM")):
            items = np.ones(ITEMS, kind)
            comm.Allreduce(MPI.IN_PLACE, items, op=getattr(MPI, name))
            assert "by turns" not in comm.last_plan.reason
        comm.Allgather(np.ones(ITEMS), np.empty(ITEMS * SIZE))
        assert "by turns: call 1" in comm.last_plan.reason


def test_it_is_off_unless_asked_for(monkeypatch, files):
    monkeypatch.delenv("COLLECTIVES_TURNS", raising=False)
    with Communicator(MPI.COMM_WORLD) as comm:
        run(comm)
        assert "turns" not in comm.last_plan.reason
    monkeypatch.setenv("COLLECTIVES_TURNS", "1")
    with Communicator(MPI.COMM_WORLD) as comm:
        run(comm, 1)
        assert ("by turns" in comm.last_plan.reason) == (SIZE > 1)


@needs_two
def test_small_calls_and_named_algorithms_are_left(comm):
    comm.Allreduce(MPI.IN_PLACE, np.ones(10))
    assert "by turns" not in comm.last_plan.reason
    comm.Allreduce(MPI.IN_PLACE, np.ones(ITEMS), algorithm="ring")
    assert "by turns" not in comm.last_plan.reason
    doubled = MPI.Op.Create(lambda a, b, _: None, commute=True)
    comm.Allreduce(MPI.IN_PLACE, np.ones(ITEMS), op=doubled)
    assert "by turns" not in comm.last_plan.reason
    doubled.Free()


@needs_two
@pytest.mark.parametrize("slow", ["native", "ours"])
@pytest.mark.parametrize("tests", [True, False])
def test_a_persistent_plan_takes_turns(comm, monkeypatch, slow, tests):
    mine, total = np.zeros(ITEMS), np.zeros(ITEMS)
    plan = comm.Allreduce_init(mine, total)
    seconds = {"native": 1.0, "ours": 1.0, slow: 2.0}
    clock(monkeypatch, seconds["native"], seconds["ours"])
    taken = []
    for call in range(ALL + 3):
        mine[:] = RANK + call
        total[:] = -1
        plan.Start()
        if call == ALL + 2:
            with pytest.raises(RuntimeError, match=r"[uU]nder way|started twice|without Wait"):
                plan.Start()
            with pytest.raises(RuntimeError, match="under way"):
                plan.Free()
        while tests and not plan.Test():
            pass
        plan.Wait()
        taken.append(plan.algorithm)
        assert (total == SIZE * (SIZE - 1) / 2 + SIZE * call).all()
    assert MPI.COMM_WORLD.allgather(taken) == [taken] * SIZE
    kept = "butterfly" if slow == "native" else "native"
    assert taken[-2:] == [kept] * 2 and set(taken[:ALL]) == {"native", "butterfly"}
    plan.Free()
    with pytest.raises(RuntimeError, match="was freed"):
        plan.Start()
    # The next plan knows it already, and so do blocking and nonblocking calls.
    with Communicator(MPI.COMM_WORLD, turns=True) as other:
        assert other.Allreduce_init(mine, total).algorithm == kept
        other.Iallreduce(mine, total).Wait()
        assert other.last_plan.algorithm == kept


@needs_two
def test_start_waits_for_nobody(comm):
    """One rank starts and then sends what the other waits for before it starts."""
    mine, total = np.full(ITEMS, float(RANK)), np.zeros(ITEMS)
    plan = comm.Allreduce_init(mine, total)
    world = MPI.COMM_WORLD
    for _ in range(ALL + 2):
        if RANK == 0:
            plan.Start()
            for peer in range(1, SIZE):
                world.send(None, peer)
        else:
            world.recv(source=0)
            plan.Start()
        plan.Wait()
        assert (total == SIZE * (SIZE - 1) / 2).all()
    plan.Free()


@needs_two
def test_plans_and_calls_that_interleave(comm):
    """A plan decides in a Wait that other ranks come to later."""
    mine, total, other = np.full(ITEMS, float(RANK)), np.zeros(ITEMS), np.ones(2 * ITEMS)
    plan = comm.Allreduce_init(mine, total)
    for turn in range(ALL + 3):
        plan.Start()
        if RANK % 2:
            plan.Wait()
        other[:] = 1
        comm.Allreduce(MPI.IN_PLACE, other)
        request = comm.Iallreduce(np.ones(ITEMS), np.zeros(ITEMS))
        plan.Wait()
        request.Wait()
        assert (other == SIZE).all() and (total == SIZE * (SIZE - 1) / 2).all(), turn
    plan.Free()


def test_the_command_lists_and_forgets(comm, files, capsys):
    run(comm)
    capsys.readouterr()
    assert main(["turns"]) == 0
    told = capsys.readouterr().out
    assert f"findings in {files}" in told
    if RANK == 0 and SIZE > 1:
        assert f"allreduce of float64, 2^17 bytes, numpy, {SIZE} ranks" in told
    assert main(["turns", "--forget"]) == 0
    assert not files.exists() and main(["turns"]) == 0
    assert "0 findings" in capsys.readouterr().out
