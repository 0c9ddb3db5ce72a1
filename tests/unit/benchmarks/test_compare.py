"""Files of several runs in one table: of one collective, of several libraries, of auto."""

import json
from pathlib import Path

import pytest

from benchmarks.compare import main

RECORD = {
    "collective": "allreduce", "algorithm": "auto", "ran": "ring", "memory": "numpy", "bytes": 8,
    "in_place": False, "p50_us": 1.0, "ranks": 2,
}  # fmt: skip


def written(folder, name, rows, mpi="A", **same):
    """A benchmark's file: rows of algorithm, what ran, microseconds and bytes."""
    fields = "algorithm", "ran", "p50_us", "bytes"
    results = [RECORD | same | dict(zip(fields, row)) for row in rows]
    about = {"mpi": mpi, "threads": "single", "store_ns": None}
    path = folder / f"{name}.json"
    path.write_text(json.dumps({"environment": about, "results": results}))
    return str(path)


@pytest.mark.parametrize("in_place", [False, True])
def test_compare(capsys, tmp_path, in_place):
    rows = [(name, name, us, 1024) for name, us in (("ring", 2.0), ("native", 3.0))]
    assert main([written(tmp_path, "a", rows, "Some MPI 1.0", in_place=in_place)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "| bytes | Some MPI 1.0, single: native (us) | ring |",
        "| ---: | ---: | ---: |",
        "| 1 KiB | 3.0 | 1.50x |",
    ]


def test_auto_over_several_runs(capsys, tmp_path):
    def run(number, large, small):
        rows = [("auto", "ring", 1, 1 << 20), ("native", "native", large, 1 << 20)]
        rows += [("auto", "native", 1, 8), ("native", "native", small, 8)]
        return written(tmp_path, number, rows)

    assert main(["--auto", run(1, 2, 1), run(2, 1.5, 0.9), run(3, 4, 0.5)]) == 0
    _, _, row, _, count, slow = capsys.readouterr().out.splitlines()
    assert row == "| allreduce | 3 | 1 | 1.50 | 2.00 | 2.00 | 1 | 0.50 | 0.90 |"
    assert count == "below 0.97 in the median of the runs: 1 of 2 cases"
    assert slow == "- allreduce of 8 B, numpy, A, single: 1.00 0.90 0.50; auto took native"


def run_of(folder, mpi, native, ours, memory="numpy"):
    """A benchmark file of one size: microseconds of the library, and of ours by algorithm."""
    rows = [("native", "native", native), *ours]
    return written(folder, mpi, rows, mpi, memory=memory, bytes=1 << 20)


def test_peers_tell_what_auto_does_for_ordinary_arrays_and_for_those_of_empty(capsys, tmp_path):
    ordinary = run_of(tmp_path, "A", 30.0, [("auto", "native", 24.0)])
    empty = run_of(tmp_path, "B", 40.0, [("auto", "direct", 10.0)], memory="shared")
    assert main(["--peers", ordinary, empty]) == 0
    cells = capsys.readouterr().out.splitlines()[2].strip("| ").split(" | ")
    beside = ["30.0 (1.25)", "40.0 (1.67)"]
    assert cells == ["1 MiB", *beside, "24.0", "1.25", "1.46", "10.0", "3.00", "3.50", "4.00"]


def test_several_runs_of_a_library_count_with_the_medians_of_their_times(capsys, tmp_path):
    runs = []
    for number, (native, ours) in enumerate(((30.0, 20.0), (90.0, 10.0), (60.0, 40.0))):
        (tmp_path / str(number)).mkdir()
        runs.append(run_of(tmp_path / str(number), "A", native, [("auto", "direct", ours)]))
    assert main(["--peers", *runs]) == 0
    assert "| 60.0 (3.00) | 20.0 | 3.00 | 3.00 |" in capsys.readouterr().out


def test_peers(capsys, tmp_path):
    """Each library is compared with ours in its own run: the second was on a slower machine."""
    direct = "direct in 2 segments"
    quick = run_of(tmp_path, "A", 30.0, [("direct", direct, 10.0), ("auto", direct, 12.0)])
    slow = run_of(tmp_path, "B", 40.0, [("ring", "ring", 20.0), ("auto", "native", 41.0)])
    gloo = run_of(tmp_path, "Gloo", 100.0, [])
    assert main(["--peers", quick, slow, gloo]) == 0
    cells = capsys.readouterr().out.splitlines()[2].strip("| ").split(" | ")
    times = ["30.0 (2.50)", "40.0 (0.98)", "100.0 (2.44)"]
    assert cells == ["1 MiB", *times, "26.5", "0.98", "2.44", "-", "-", "-", "2.50"]
    assert main(["--peers", gloo]) == 2
    assert "none of the files has a row of ours" in capsys.readouterr().err
    picture = tmp_path / "peers.png"
    assert main(["--peers", quick, slow, gloo, "--plot", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    other = tmp_path / "other.json"
    other.write_text(Path(quick).read_text().replace('"allreduce"', '"allgather"'))
    assert main(["--peers", quick, str(other)]) == 2
    assert "these files are of allgather, allreduce on 2 ranks" in capsys.readouterr().err
    assert main(["--peers", gloo, "--plot", str(picture)]) == 2
    assert "none of the files has a row of auto" in capsys.readouterr().err
