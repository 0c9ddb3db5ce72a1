"""The benchmark: its columns, its files, and that it notices wrong results."""

import csv
import json

import pytest
from mpi4py import MPI

from collectives import Communicator
from collectives.__main__ import main
from collectives.algorithms import names
from collectives.bench.measure import FLOORS
from collectives.contracts import CONTRACTS

QUICK = ["-b", "8", "-e", "2K", "-f", "16", "-n", "2", "--repeats", "3"]


def bench(folder, *arguments):
    """Exit status and, on every rank, what rank 0 wrote."""
    status = main(["bench", *arguments, "-J", f"{folder}/b.json", "--csv", f"{folder}/b.csv"])
    MPI.COMM_WORLD.Barrier()
    return status, json.loads((folder / "b.json").read_text())


#: Benchmarks of other names or calls than the collectives: what is measured, and an algorithm.
OTHERS = {
    "osu_bcast": ("broadcast", "chain"),
    "osu_alltoallv": ("alltoallv", "pairwise"),
    "gatherv": ("gatherv", "native"),
}


@pytest.mark.quick_on(2, 3)
@pytest.mark.parametrize("collective", [*CONTRACTS, *OTHERS])
def test_every_algorithm_is_measured_and_right(comm, folder, capsys, collective):
    status, told = bench(folder, collective, *QUICK, "--place", "both", "--floor")
    results = told["results"]
    measured, one = OTHERS.get(collective) or (collective, names(collective)[0])
    assert status == 0 and {r["collective"] for r in results} == {measured}
    assert {r["algorithm"] for r in results} >= {"native", one}
    right = None if collective == "barrier" else 0
    assert all(r["wrong"] == right and len(r["times_us"]) == 3 for r in results)
    assert all(r["p50_us"] > 0 and len(r["ranks_us"]) == comm.size for r in results)
    floors = {(r["floor_us"] or 0) > 0 for r in results}
    assert floors == {measured.removesuffix("v") in FLOORS}
    empty = {(r["bytes"], r["op"]) for r in results} == {(1, "none")}
    assert empty == (collective == "barrier")
    assert told["environment"]["ranks"] == comm.size
    assert (comm.size == 1) == (told["environment"]["store_ns"] is None)
    with (folder / "b.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(results)
    lines = capsys.readouterr().out.splitlines()
    if comm.rank == 0:
        rows = [line.split() for line in lines if not line.startswith("#")]
        assert rows[0][:4] == ["size(B)", "count", "type", "redop"]
        assert len(rows) - 1 == len(results)
    else:
        assert not lines


def test_osus_columns_a_plot_and_too_little_bandwidth(comm, folder, capsys):
    more = ["--format", "osu", "--plot", f"{folder}/b.png", "--min-busbw", "1e9", "--floor"]
    more += ["--memory", "both", "--place", "both"]
    status, told = bench(folder, "allreduce", *QUICK, "--algorithm", "ring", *more)
    assert status == 1 and all(r["floor_us"] > 0 for r in told["results"])
    if comm.rank == 0:
        told = capsys.readouterr().out
        assert "# Size       Avg Latency(us)   Min Latency(us)" in told
        rows = [line.split() for line in told.splitlines() if line[:1].isdigit()]
        buffers = [("numpy", "out"), ("numpy", "in"), ("shared", "out"), ("shared", "in")]
        assert len(rows) % 4 == 0 and {(*row[-2:],) for row in rows} == {*buffers}
        assert (folder / "b.png").read_bytes().startswith(b"\x89PNG")


def test_wrong_results_are_counted(comm, folder, monkeypatch):
    real = Communicator.plan

    def sabotaged(comm, arguments, algorithm):
        plan = real(comm, arguments, algorithm)
        if algorithm == "ring":
            recv = arguments.recvbuf[0]
            plan._program = [*plan._program, lambda: recv.__setitem__(0, -1 / 3)]
        return plan

    monkeypatch.setattr(Communicator, "plan", sabotaged)
    status, told = bench(folder, "allreduce", *QUICK, "--algorithm", "ring")
    assert status == 1
    wrong = {r["algorithm"]: r["wrong"] for r in told["results"]}
    assert wrong["ring"] == comm.size  # an element on each rank, of which several bytes differ
    assert wrong["native"] == 0


def test_sets_of_buffers_leave_all_plans_in_shared_memory(folder, caplog):
    more = ["--memory", "shared", "--buffers", "rotating", "-e", "8", "-n", "1", "--repeats", "1"]
    results = bench(folder, "allreduce", *more)[1]["results"]
    assert 400 < len(results) * results[0]["sets"] <= 510
    assert not caplog.messages


def test_mistakes(comm, capsys, monkeypatch):
    many = f"hierarchical:local={comm.size + 1}"
    sentences = {
        "allreduce --algorithm rign": "did you mean 'ring'?",
        f"allreduce --algorithm {many}": f"must lie in 1..{comm.size}, the number of",
        "allreduce -d flaot": "no type 'flaot'",
        "allreduce -o band": "collectives: MPI defines no bitwise_and on float32",
        "reduce_scatter --place in": "collectives: reduce_scatter is measured out of place only, "
        "as its input does not fit where its result goes; use --place out\n",
        "scatter --place in": "collectives: scatter is measured out of place only, as",
    }
    for words in sentences:
        assert main(["bench", *words.split()]) == 2
    pairs = ["bench", "osu_bw", "-e", "8", "-n", "1", "--repeats", "1"]
    assert main(pairs) == (2 if comm.size == 1 else 0)
    with monkeypatch.context() as apart:
        apart.setattr(Communicator, "ranks_per_node", property(lambda self: 1))
        assert comm.size == 1 or main(["bench", "allreduce", "--memory", "both"]) == 2
    # As where native alone is asked for, and has no such type.
    monkeypatch.setattr("collectives.bench.measure.measure", lambda on, case: [])
    assert main(["bench", "allreduce", *QUICK]) == 2
    told = capsys.readouterr().err
    assert ("bandwidth is measured between pairs of ranks; start it as" in told) == (comm.size == 1)
    several = "collectives: ranks of several nodes"
    assert (several in told) == (comm.rank == 0 < comm.size - 1)
    for sentence in (*sentences.values(), "nothing was measured"):
        assert (sentence in told) == (comm.rank == 0)
