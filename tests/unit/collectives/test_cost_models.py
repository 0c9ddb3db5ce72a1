"""Closed forms against the simulator, fits of made-up machines, and the tables of both."""

import json

import numpy as np
import pytest

from collectives.__main__ import main
from collectives.algorithms import build, in_segments
from collectives.analysis.fit import fit, read
from collectives.analysis.formulas import FORMULAS
from collectives.analysis.simulate import Machine, simulate
from collectives.analysis.topology import LinkCost, Topology
from collectives.calls.tables import DEFAULT, load
from collectives.compile.cost import Model, best_segments, count
from collectives.errors import UnknownAlgorithm

MODEL = Model(2e-6, 1e-9, 3e-10)
MACHINE = Machine(Topology(LinkCost(MODEL.alpha, MODEL.beta)), MODEL.gamma)
M = 3 << 18  # a multiple of all numbers of ranks below
CASES = [
    pytest.param(formula, p, id=f"{formula.algorithm}-{p}")
    for formula in FORMULAS
    for p in (2, 3, 4, 6, 8, 12, 16)
    if not (formula.powers_only and p & (p - 1))
]


@pytest.mark.parametrize(("formula", "p"), CASES)
def test_closed_forms_are_what_the_simulator_gives(formula, p):
    simulated = simulate(build("allreduce", formula.algorithm, p), M, MACHINE)
    closed = formula.seconds(MODEL, M, p)
    if formula.algorithm == "double_binary_tree":
        assert simulated <= closed * 1.001
        assert p & (p - 1) or closed <= 2 * simulated
    elif formula.algorithm == "circulant":
        assert closed <= simulated <= closed + 2 * p * MODEL.alpha
    else:
        assert simulated == pytest.approx(closed, rel=1e-3)


def test_the_textbooks_forms_are_less_by_the_ports():
    direct = next(f for f in FORMULAS if f.algorithm == "direct")
    assert direct.book_seconds(MODEL, M, 8) == pytest.approx(2 * (MODEL.alpha + MODEL.beta * M / 8))
    many = Machine(Topology(LinkCost(MODEL.alpha, MODEL.beta)), gamma=0.0, ports="multi")
    simulated = simulate(build("allreduce", "direct", 8), M, many)
    assert simulated == pytest.approx(direct.book_seconds(MODEL, M, 8), rel=1e-3)


#: A test between pairs of ranks, which no schedule explains.
PAIRS = {"collective": "latency", "algorithm": "native", "memory": "numpy", "in_place": False}


def measured(
    path, model, noise=0.0, slow_from=1 << 62, ran=("ring", "butterfly", "binomial_tree"),
    of="allreduce", rounds=1, how="",
):  # fmt: skip
    """A benchmark's file of a machine that is exactly the model, or two of them."""
    rng = np.random.default_rng(0)
    results = [{**PAIRS, "bytes": 8, "p50_us": 1.0}]
    for algorithm in ran:
        cost = count(build(of.removesuffix("v"), algorithm, 4))
        told = {"collective": of, "algorithm": algorithm, "ran": algorithm + how, "ranks": 4}
        for nbytes in [8 << (2 * k) for k in range(12)]:
            here = model if nbytes < slow_from else model._replace(alpha=1e-3)
            counted = cost.latency * rounds, cost.sent * nbytes, cost.reduced * nbytes
            time = 1e6 * np.dot(counted, here) * (1 + noise * rng.standard_normal())
            results.append({**PAIRS, **told, "bytes": nbytes, "p50_us": time})
    about = {"mpi": "Some MPI 1.0", "threads": "single"}
    path.write_text(json.dumps({"environment": about, "results": results}))
    return path


def test_a_machine_that_is_the_model_is_found_again(tmp_path):
    (found,) = fit(read([measured(tmp_path / "b.json", MODEL)])[0])
    assert found.model == pytest.approx(MODEL, rel=1e-6)
    assert found.errors.max() < 1e-6
    (found,) = fit(read([measured(tmp_path / "b.json", MODEL, ran=["ring"], of="allgatherv")])[0])
    assert found.model == pytest.approx(MODEL._replace(gamma=0.0), rel=1e-6)
    (noisy,) = fit(read([measured(tmp_path / "b.json", MODEL, noise=0.02)])[0])
    assert noisy.model.alpha == pytest.approx(MODEL.alpha, rel=0.05)
    assert noisy.model.beta == pytest.approx(MODEL.beta, rel=0.1)


def test_two_machines_in_one_are_told_apart(tmp_path):
    below, above = fit(read([measured(tmp_path / "b.json", MODEL, slow_from=1 << 15)])[0])
    assert below.most < 1 << 15 <= above.least
    assert above.model.alpha == pytest.approx(1e-3, rel=1e-3)


def test_times_of_a_ring_alone_are_those_of_its_messages(tmp_path):
    """Its reductions are in proportion to them."""
    sent = MODEL._replace(gamma=0.0)
    for seed in range(8):
        slower = sent._replace(beta=(1 + 0.1 * seed) * sent.beta)
        (found,) = fit(read([measured(tmp_path / "b.json", slower, ran=["ring"])])[0])
        assert found.model == pytest.approx(slower, rel=1e-6)


def test_the_commands(tmp_path, capsys):
    assert main(["cost", "-n", "6"]) == 0
    told = capsys.readouterr().out
    assert "T_PS = 2(L + T')" in told
    assert all(formula.algorithm in told for formula in FORMULAS)
    # Both have one network by default, so one time.
    assert main(["simulate", "-n", "6", "-b", "1M", "--algorithm", "ring"]) == 0
    simulated = capsys.readouterr().out
    assert "network flat, 1.5 us, 25 GB/s, one-port" in told and simulated
    of_cost = next(line for line in told.splitlines() if line.startswith("ring")).split()
    of_simulate = simulated.splitlines()[2].split()
    assert float(of_simulate[1]) == pytest.approx(1e-3 * float(of_cost[2]), abs=1e-3)
    assert main(["cost", "bcast", "-n", "6"]) == 0
    assert "double_binary_tree " in capsys.readouterr().out
    assert main(["fit", str(measured(tmp_path / "b.json", MODEL))]) == 0
    told = capsys.readouterr().out
    assert "alpha 2.00 us, 1/beta 1.0 GB/s, 1/gamma 3.3 GB/s; error: median 0%, largest 0%" in told
    assert "left out" not in told


def test_segments_that_follow_one_another_are_fitted_and_others_left_out(tmp_path, capsys):
    segments = measured(tmp_path / "s.json", MODEL, rounds=8, how=" in 8 segments")
    servers = ["parameter_server:servers=2", "ring"]
    how = " in 4 overlapping segments"
    overlapping = measured(tmp_path / "o.json", MODEL, ran=servers, how=how)
    assert main(["fit", str(segments), str(overlapping)]) == 0
    told = capsys.readouterr().out
    assert told.startswith("left out: 24 rows in overlapping segments or of unknown algorithms\n")
    assert "alpha 2.00 us, 1/beta 1.0 GB/s, 1/gamma 3.3 GB/s; error: median 0%, largest 0%" in told
    assert main(["fit", str(overlapping)]) == 2
    assert "three parameters need more; left out: 24 rows in" in capsys.readouterr().err


def test_segments_by_the_cost_model():
    chain, free = build("broadcast", "chain", 9), MODEL._replace(alpha=0.0)
    assert best_segments(chain, 1e6, MODEL) == round((7 * MODEL.beta * 1e6 / MODEL.alpha) ** 0.5)
    assert best_segments(chain, 1e6, free) == 1
    assert best_segments(build("scan", "chain", 1), 1e6, MODEL) == 1
    best = best_segments(chain, 1 << 24, MODEL)
    times = {
        k: simulate(build("broadcast", f"chain:segments={k}", 9), 1 << 24, MACHINE)
        for k in (best // 3, best, best * 3)
    }
    assert min(times, key=times.__getitem__) == best

    table = load(DEFAULT)
    network = Model(1e-6 * table.alpha_us, 1e-9 / table.bandwidth_GBs, 0.0)
    for collective, algorithm, segments in (
        ("allreduce", "ring", 1),
        ("allgather", "ring", 1),
        ("alltoall", "pairwise", 1),
        ("broadcast", "binomial_tree", 1),
        ("broadcast", "chain", 31),
        ("allreduce", "double_binary_tree", 11),
    ):
        schedule = build(collective, algorithm, 8)
        parts = schedule.chunks * schedule.contract.blocks(8)
        assert best_segments(schedule, (1 << 20) / parts, network) == segments, algorithm

    for asked, found in (("chain:segments=auto", "chain:segments=5"), ("chain", "chain")):
        assert in_segments("broadcast", asked, 9, lambda schedule: 5) == found
    with pytest.raises(UnknownAlgorithm, match="or auto in a call whose size is known"):
        build("broadcast", "chain:segments=auto", 9)
