"""``autotune``: what ranks with other clocks and other files agree on."""

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

from collectives import Communicator
from collectives.calls import autotune
from collectives.calls.autotune import ORDER, table_of_host
from collectives.calls.native import library

pytestmark = [pytest.mark.mpi, pytest.mark.quick_on(3)]

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
ITEMS = 1 << 14
needs_two = pytest.mark.mpi(min_size=2)


@pytest.fixture(autouse=True)
def file(monkeypatch, tmp_path) -> Path:
    """A cache folder for each rank, as on hosts of their own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / f"cache{RANK}"))
    return table_of_host()


@pytest.fixture
def comm() -> Iterator[Communicator]:
    with Communicator(MPI.COMM_WORLD, autotune=True) as made:
        yield made


def clock(monkeypatch, native: float, ours: float) -> None:
    """Measured runs take so long, on this rank."""
    numbers = count()

    def now() -> float:
        number = next(numbers)
        if number % 2 == 0:
            return 0.0
        return native if ORDER[number // 2 % len(ORDER)] == "native" else ours

    monkeypatch.setattr(autotune, "perf_counter", now)


def run(comm: Communicator, calls: int = 3) -> list[str]:
    """The algorithms of some all-reduces, which all ranks must see alike."""
    mine, total, taken = np.zeros(ITEMS), np.zeros(ITEMS), []
    for call in range(calls):
        mine[:] = RANK + call
        total[:] = -1
        comm.Allreduce(mine, total)
        assert (total == SIZE * (SIZE - 1) / 2 + SIZE * call).all()
        assert comm.last_plan is not None
        taken.append(comm.last_plan.algorithm)
    assert MPI.COMM_WORLD.allgather(taken) == [taken] * SIZE
    return taken


@needs_two
@pytest.mark.parametrize(("slow_rank_says", "kept"), [(1.0, "native"), (9.0, "butterfly")])
def test_the_slowest_rank_counts(comm, monkeypatch, slow_rank_says, kept):
    clock(monkeypatch, slow_rank_says if RANK == SIZE - 1 else 0.1, 3.0 if RANK == 0 else 0.1)
    assert run(comm) == [kept] * 3
    clock(monkeypatch, 1e9, 1.0)  # nothing is measured again
    assert run(comm) == [kept] * 3


@needs_two
def test_rank_0_remembers_and_the_others_files_play_no_part(comm, monkeypatch, file):
    clock(monkeypatch, 9.0, 1.0)
    run(comm)
    assert file.exists() == (RANK == 0)
    if RANK == 0:
        (entry,) = json.loads(file.read_text())["entries"]
        assert entry["rules"] == [{"from_bytes": 8 * ITEMS, "algorithm": "butterfly", "ratio": 9.0}]
    else:
        file.parent.mkdir(parents=True)
        file.write_text("not what rank 0 has")
    clock(monkeypatch, 1.0, 9.0)
    with Communicator(MPI.COMM_WORLD, autotune=True) as other:
        assert run(other) == ["butterfly"] * 3
        assert "autotuned at 131072 bytes: 9.00x native" in other.last_plan.reason or RANK < 0


@needs_two
def test_two_communicators_add_to_one_file(comm, monkeypatch, file):
    clock(monkeypatch, 9.0, 1.0)
    with Communicator(MPI.COMM_WORLD, autotune=True) as other:
        run(comm), run(other)
        values = np.zeros(SIZE * ITEMS)
        other.Allgather(MPI.IN_PLACE, values)
        comm.Allreduce(np.zeros(4 * ITEMS), np.zeros(4 * ITEMS))
    if RANK == 0:
        entries = json.loads(file.read_text())["entries"]
        rules = {e["collective"]: [r["from_bytes"] for r in e["rules"]] for e in entries}
        assert rules["allreduce"] == [8 * ITEMS, 32 * ITEMS] and len(rules["allgather"]) == 1


@needs_two
@pytest.mark.parametrize("content", ["{", "[" * 5000, '{"version": 7}', "{}"])
def test_a_broken_file_is_written_anew(comm, monkeypatch, file, caplog, content):
    file.parent.mkdir(parents=True)
    file.write_text(content)
    clock(monkeypatch, 9.0, 1.0)
    assert run(comm) == ["butterfly"] * 3
    assert RANK or "cannot read the tuning table" in caplog.text
    assert RANK or json.loads(file.read_text())["entries"]


@needs_two
def test_findings_that_cannot_be_written_are_used(comm, monkeypatch, file, caplog):
    file.parent.parent.mkdir(parents=True, exist_ok=True)
    file.parent.write_text("no folder")
    clock(monkeypatch, 9.0, 1.0)
    assert run(comm) == ["butterfly"] * 3
    assert RANK or "is not remembered" in caplog.text


def test_what_is_not_measured(comm, monkeypatch):
    def tuned() -> bool:
        return "autotuned" in comm.last_plan.reason

    small, large = np.zeros(10), np.zeros(ITEMS)
    comm.Allreduce(MPI.IN_PLACE, small)
    assert not tuned()
    comm.Allreduce(MPI.IN_PLACE, large, algorithm="ring")
    assert not tuned()
    comm.Iallreduce(MPI.IN_PLACE, large).Wait()
    assert not tuned()
    op = MPI.Op.Create(lambda a, b, _: None, commute=True)
    comm.Allreduce(MPI.IN_PLACE, large, op=op)
    assert not tuned()
    op.Free()
    with Communicator(MPI.COMM_WORLD, autotune=True, reproducible=True) as exact:
        exact.Allreduce(MPI.IN_PLACE, large)
        assert "autotuned" not in exact.last_plan.reason


@needs_two
def test_nonblocking_calls_take_what_is_known(comm, monkeypatch):
    clock(monkeypatch, 9.0, 1.0)
    run(comm)
    values = np.full(ITEMS, 1.0)
    request = comm.Iallreduce(MPI.IN_PLACE, values)
    request.Wait()
    assert request.algorithm == "butterfly" and (values == SIZE).all()


@needs_two
@pytest.mark.parametrize(("native", "ours"), [(1.0, 9.0), (9.0, 1.0)])
def test_a_persistent_plan_is_measured_when_it_is_made(comm, monkeypatch, native, ours):
    clock(monkeypatch, native, ours)
    values = np.zeros(ITEMS)
    plan = comm.Allreduce_init(MPI.IN_PLACE, values)
    assert (plan.algorithm == "native") == (native < ours)
    for turn in range(3):
        values[:] = RANK + turn
        plan.Start()
        plan.Wait()
        assert (values == SIZE * (SIZE - 1) / 2 + SIZE * turn).all()
    plan.Free()


@needs_two
@pytest.mark.parametrize("memory", ["numpy", "shared", "adopted"])
@pytest.mark.parametrize("ours", [0.1, 10.0])
def test_what_was_measured_does_not_count_as_traffic(comm, monkeypatch, memory, ours):
    """The soak has calls of every kind that are measured."""
    clock(monkeypatch, 1.0, ours)
    traffic = comm.count_traffic()
    mine, total = (
        comm.empty(SIZE * ITEMS, np.float32)
        if memory == "shared"
        else np.zeros(SIZE * ITEMS, np.float32)
        for _ in range(2)
    )
    if memory == "adopted":
        mine, total = comm.share(mine), comm.share(total)
    mine[:] = RANK + 1
    comm.Allreduce(mine, total)
    assert (total == SIZE * (SIZE + 1) // 2).all() and (mine == RANK + 1).all()
    once = replace(traffic)
    comm.Allreduce(mine, total)
    assert (traffic.native, traffic.sent, traffic.shared) == (
        2 * once.native,
        2 * once.sent,
        2 * once.shared,
    )


def test_the_environment_asks_for_it(monkeypatch):
    for value, wanted in (("0", False), ("1", SIZE > 1)):
        monkeypatch.setenv("COLLECTIVES_AUTOTUNE", value)
        with Communicator(MPI.COMM_WORLD) as comm:
            run(comm)
            plan = comm.Allreduce_init(MPI.IN_PLACE, np.zeros(ITEMS))
            assert ("autotuned" in plan.reason) == wanted
            plan.Free()


@needs_two
def test_auto_by_name_reads_the_file_on_all_ranks_together(file):
    """Only rank 0 has one, and no rank has asked before how many ranks a node has."""
    if RANK == 0:
        entry = {"mpi": library(), "collective": "allreduce", "memory": "numpy", "ranks": SIZE}
        rule = {"from_bytes": 8 * ITEMS, "algorithm": "ring", "ratio": 2.0}
        entry |= {"ranks_per_node": SIZE, "rules": [rule]}
        table = {"version": 1, "environment": {}, "alpha_us": 1, "bandwidth_GBs": 1}
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps(table | {"entries": [entry]}))
    with Communicator(MPI.COMM_WORLD, autotune=True) as comm:
        total = np.ones(ITEMS)
        comm.Allreduce(MPI.IN_PLACE, total, algorithm="auto")
        assert comm.last_plan.algorithm == "ring" and (total == SIZE).all()
