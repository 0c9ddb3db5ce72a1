"""The benchmark: its columns, its files, and that it notices wrong results."""

import csv
import json

import pytest

from collectives import Communicator
from collectives.__main__ import main
from collectives.algorithms import names
from collectives.contracts import CONTRACTS

QUICK = ["-b", "8", "-e", "2K", "-f", "16", "-n", "2", "--repeats", "3"]


def bench(comm, folder, *arguments):
    """Exit status and, on every rank, what rank 0 wrote."""
    folder = comm.bcast(str(folder))
    status = main(["bench", *arguments, "-J", f"{folder}/b.json", "--csv", f"{folder}/b.csv"])
    comm.Barrier()
    with open(f"{folder}/b.json") as file:
        return status, json.load(file), folder


#: What has another name or call than the collectives: what is measured, and an algorithm.
OTHERS = {
    "osu_bcast": ("broadcast", "chain"),
    "osu_alltoallv": ("alltoallv", "pairwise"),
    "gatherv": ("gatherv", "native"),
}


@pytest.mark.quick_on(2, 3)
@pytest.mark.parametrize("collective", [*CONTRACTS, *OTHERS])
def test_every_algorithm_is_measured_and_right(comm, tmp_path, capsys, collective):
    status, told, folder = bench(comm, tmp_path, collective, *QUICK, "--place", "both")
    assert status == 0
    results = told["results"]
    measured, one = OTHERS.get(collective) or (collective, names(collective)[0])
    assert {r["collective"] for r in results} == {measured}
    assert {r["algorithm"] for r in results} >= {"native", one}
    right = None if collective == "barrier" else 0
    assert all(r["wrong"] == right and len(r["times_us"]) == 3 for r in results)
    assert all(r["p50_us"] > 0 and len(r["ranks_us"]) == comm.size for r in results)
    empty = {(r["bytes"], r["op"]) for r in results} == {(1, "none")}
    assert empty == (collective == "barrier")
    assert told["environment"]["ranks"] == comm.size
    assert (comm.size == 1) == (told["environment"]["store_ns"] is None)
    with open(f"{folder}/b.csv") as file:
        assert len(list(csv.DictReader(file))) == len(results)
    lines = capsys.readouterr().out.splitlines()
    if comm.rank == 0:
        rows = [line.split() for line in lines if not line.startswith("#")]
        assert rows[0][:4] == ["size(B)", "count", "type", "redop"]
        assert len(rows) - 1 == len(results)
    else:
        assert not lines


@pytest.mark.quick_on(2, 3)
@pytest.mark.parametrize("collective", ["allreduce", "broadcast"])
def test_the_least_memory_traffic(comm, tmp_path, collective):
    _, told, _ = bench(comm, tmp_path, collective, *QUICK, "--floor", "--memory", "both")
    for result in told["results"]:
        known = collective != "broadcast"
        assert (result["floor_us"] is not None) == known
        assert not known or result["floor_us"] > 0


def test_osus_columns_a_plot_and_too_little_bandwidth(comm, tmp_path, capsys):
    more = ["--format", "osu", "--plot", f"{tmp_path}/b.png", "--min-busbw", "1e9"]
    more += ["--memory", "both", "--place", "both"]
    status, _, folder = bench(comm, tmp_path, "allreduce", *QUICK, "--algorithm", "ring", *more)
    assert status == 1
    if comm.rank == 0:
        told = capsys.readouterr().out
        assert "# Size       Avg Latency(us)   Min Latency(us)" in told
        rows = [line.split() for line in told.splitlines() if line[:1].isdigit()]
        buffers = [("numpy", "out"), ("numpy", "in"), ("shared", "out"), ("shared", "in")]
        assert len(rows) % 4 == 0 and {(*row[-2:],) for row in rows} == {*buffers}
        with open(f"{folder}/b.png", "rb") as file:
            assert file.read(4) == b"\x89PNG"


def test_wrong_results_are_counted(comm, tmp_path, monkeypatch):
    real = Communicator.plan

    def sabotaged(comm, arguments, algorithm):
        plan = real(comm, arguments, algorithm)
        if algorithm == "ring":
            recv = arguments.recvbuf[0]
            plan._program = [*plan._program, lambda: recv.__setitem__(0, -1 / 3)]
        return plan

    monkeypatch.setattr(Communicator, "plan", sabotaged)
    status, told, _ = bench(comm, tmp_path, "allreduce", *QUICK, "--algorithm", "ring")
    assert status == 1
    wrong = {r["algorithm"]: r["wrong"] for r in told["results"]}
    assert wrong["ring"] == comm.size  # an element on each rank, of which several bytes differ
    assert wrong["native"] == 0


def test_sets_of_buffers_leave_all_plans_in_shared_memory(comm, tmp_path, caplog):
    more = ["--memory", "shared", "--buffers", "rotating", "-e", "8", "-n", "1", "--repeats", "1"]
    _, told, _ = bench(comm, tmp_path, "allreduce", *more)
    results = told["results"]
    assert 400 < len(results) * results[0]["sets"] <= 510
    assert not caplog.messages


def test_mistakes(comm, capsys, monkeypatch):
    assert main(["bench", "allreduce", "--algorithm", "rign"]) == 2
    nodes = f"hierarchical:local={comm.size + 1}"
    assert main(["bench", "allreduce", "--algorithm", nodes]) == 2
    assert main(["bench", "allreduce", "-d", "flaot"]) == 2
    assert main(["bench", "allreduce", "-o", "band"]) == 2
    assert main(["bench", "reduce_scatter", "--place", "in"]) == 2
    assert main(["bench", "scatter", "--place", "in"]) == 2
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
    several = "error: ranks of several nodes"
    assert (several in told) == (comm.rank == 0 < comm.size - 1)
    for sentence in (
        "did you mean 'ring'?",
        f"error: hierarchical: local={comm.size + 1} must lie in 1..{comm.size}, the number of",
        "no type 'flaot'",
        "error: MPI defines no bitwise_and on float32",
        "error: reduce_scatter is measured out of place only, as its input does not fit where its "
        "result goes; use --place out\n",
        "error: scatter is measured out of place only, as",
        "nothing was measured",
    ):
        assert (sentence in told) == (comm.rank == 0)
