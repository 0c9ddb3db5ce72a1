"""The commands of benchmarks/, started as their README says, on small sizes."""

import json

import pytest

from benchmarks.compare import table
from tests.launch import programs
from tests.launch.programs import needs_torch
from tests.launch.test_examples import ROOT, pytestmark, run  # noqa: F401


def alone(folder, *words):
    done = programs.run(folder, *words, seconds=900)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_first_calls_are_beside_later_ones(tmp_path):
    words = ["-m", "benchmarks.first_call", "-b64", "-e64", "--memory", "numpy", "shared"]
    rows = [line.split() for line in run(tmp_path, 2, *words).splitlines()[3:]]
    assert [row[:2] for row in rows] == [["64", "numpy"], ["64", "shared"]]


@pytest.mark.slow
def test_a_round_is_shown_in_parts(tmp_path):
    words = ["-m", "benchmarks.round_cost", "--calls=10"]
    assert "a plan in shared memory" in run(tmp_path, 2, *words)


@pytest.mark.slow
@needs_torch
def test_steps_are_prefetched_beside_fsdp(tmp_path):
    words = ["-m", "benchmarks.prefetch", "--width=8", "--batch=4", "--repeats=2"]
    rows = [line.split("|")[1] for line in run(tmp_path, 2, *words).splitlines() if line[0] == "|"]
    assert rows[3:] == [" ZeRO-3 ", " ZeRO-3, prefetched ", " FSDP2 over Gloo "]


@pytest.mark.slow
@needs_torch
def test_the_shadow_calls_the_module_more_often(tmp_path):
    told = alone(tmp_path, "-m", "benchmarks.shadow_cost", "--models", "MLP, 2 k")
    _, _, without, beside = [line.split("|") for line in told.splitlines() if line[0] == "|"]
    assert int(without[6]) < int(beside[6]) and int(without[7]) < int(beside[7])


@pytest.mark.slow
def test_importing_collectives_loads_three_modules(tmp_path):
    words = ["-m", "benchmarks.start_up", "--repeats=1", "--only=import collectives"]
    *_, modules, lines = alone(tmp_path, *words).splitlines()[-2].replace("│", "").split()
    assert int(modules) == 3 and int(lines) < 400


@pytest.mark.slow
def test_schedules_are_rehearsed(tmp_path):
    words = ["-m", "benchmarks.rehearse", "-m4", "--milliseconds=1"]
    rows = [line.split() for line in run(tmp_path, 2, *words).splitlines()[1:]]
    assert all(int(row[-2]) <= int(row[-1]) for row in rows) and len(rows) == 9  # activations


@pytest.mark.slow
def test_layouts_are_measured_in_the_order_of_the_search(tmp_path):
    words = ["digits_mlp", "-n2", "--flops=1e9", "--top=2", "--steps=4"]
    told = alone(tmp_path, "-m", "benchmarks.layouts", *words)
    assert "Kendall's tau" in told and "times the fastest" in told


@pytest.mark.slow
def test_the_link_of_a_search_is_measured(tmp_path):
    call, beta = json.loads(run(tmp_path, 2, "-m", "mpitrain.search.links"))
    assert 0 <= call < 1 and 0 < beta < 1e-6  # more than 1 MB/s


@pytest.mark.slow
def test_zigzag_is_beside_ring(tmp_path):
    words = ["-m", "benchmarks.zigzag", "--milliseconds=1", "--plot=zigzag.png"]
    rows = [line.split() for line in run(tmp_path, 2, *words).splitlines()[1:]]
    assert [row[1] for row in rows[:2]] == ["66.7%", "100.0%"]
    assert (tmp_path / "zigzag.png").stat().st_size > 10_000


@pytest.mark.slow
@needs_torch
def test_torch_is_beside_gloo(tmp_path):
    words = ["-m", "benchmarks.torch_backend", "--repeats=1", "-J", tmp_path / "torch.json"]
    told = run(tmp_path, 2, *words, "--sizes", "8", "128K")
    assert told.count(" | 8 B |") == 10 and told.count(" | 128 KiB |") == 5
    ratios = [line.strip("| ").split(" | ") for line in told.splitlines()[-2:]]
    assert [(row[0], len(row)) for row in ratios] == [("8 B", 6), ("128 KiB", 6)]
    told = run(tmp_path, 2, *words, "--small")
    assert [len(line.split("|")) for line in told.splitlines()[-7:]] == [10] * 7
    told = run(tmp_path, 2, *words, "--steps", "--width=64")  # it stops if the losses differ
    assert [line.split()[1] for line in told.splitlines()[-2:]] == ["DDP", "FSDP2"]
    steps = json.loads((tmp_path / "torch.json").read_text())["rows"]
    assert [sorted(row["times_s"]) for row in steps] == 2 * [["Gloo", "alone", "ours"]]


@pytest.mark.slow
@needs_torch
@pytest.mark.parametrize("collective", ["allreduce", "alltoall"])
def test_gloo_is_a_column_of_the_table(collective, tmp_path):
    how = [collective, "--ranks=2", "-b8", "-e64", "--repeats=1", f"-J{tmp_path}/gloo.json"]
    alone(tmp_path, "-m", "benchmarks.gloo", *how)
    heads, _, *rows = table([tmp_path / "gloo.json"]).splitlines()
    assert "Gloo (PyTorch" in heads and heads.count("|") == 3
    assert [row.split("|")[1].strip() for row in rows] == ["8 B", "64 B"]
    assert all(float(row.split("|")[2]) > 0 for row in rows)


@pytest.mark.slow
def test_the_matrix_is_tried(tmp_path):
    pytest.importorskip("matplotlib")
    pytest.importorskip("sklearn")
    told = run(tmp_path, 2, "-m", "benchmarks.matrix", "--quick", "--steps=2", "--out=matrix")
    assert told.endswith("matrix.html: 4 done, 1 refused\n")
    assert len(json.loads((tmp_path / "matrix" / "matrix.json").read_text())["cells"]) == 5


def test_tables_are_made_without_ranks(tmp_path):
    files = [str(path) for path in sorted(ROOT.glob("docs/figures/peers/allreduce_*.json"))]
    assert "| 64 MiB |" in run(tmp_path, None, "-m", "benchmarks.compare", "--peers", *files)
    few = ["--count=10", "--algorithm=ring"]
    assert "\nring " in run(tmp_path, None, "-m", "benchmarks.rounding", *few)
    tuned = tmp_path / "tuned.json"
    entry = {
        "mpi": "Open MPI", "collective": "allreduce", "memory": "numpy", "ranks": 2,
        "ranks_per_node": 1, "rules": [{"from_bytes": 0, "algorithm": "ring", "ratio": 2.0}],
    }  # fmt: skip
    content = {"version": 1, "environment": {}, "alpha_us": 1.0, "bandwidth_GBs": 1.0}
    tuned.write_text(json.dumps({**content, "entries": [entry]}))
    assert "0 4 0 0 # ring" in run(tmp_path, None, "-m", "benchmarks.openmpi_rules", tuned)
    told = run(tmp_path, None, "-m", "benchmarks.portable", tuned, "-o", tmp_path / "kept.json")
    assert "left out, as it may not hold elsewhere: Open MPI, allreduce, numpy" in told
    assert json.loads((tmp_path / "kept.json").read_text())["entries"] == []


def seeds(folder, table):
    told = alone(folder, "-m", "benchmarks.seeds", table)
    return [line.strip("| ").split(" | ") for line in told.splitlines() if line[:1] == "|"]


@pytest.mark.slow
def test_delayed_averaging_is_faster_by_the_published_factors(tmp_path):
    _, *cells = next(row[1:] for row in seeds(tmp_path, "dga") if row[0].startswith("CIFAR"))
    pairs = [[float(number) for number in cell.split("/")] for cell in cells]
    assert [ours for _, ours in pairs] == pytest.approx([told for told, _ in pairs], rel=0.05)


@pytest.mark.slow
def test_a_deep_pipeline_learns_on_stashed_weights_best(tmp_path):
    loss = {row[0]: float(row[2]) for row in seeds(tmp_path, "staleness")[2:]}
    assert 1.2 * loss["stash"] < min(loss["vertical"], loss["latest"])  # 1.35 to 3, by the BLAS
