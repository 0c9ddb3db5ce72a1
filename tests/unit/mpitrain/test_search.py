"""The search for layouts against brute force, closed forms and what a step really keeps."""

import os
import re
import signal
from dataclasses import replace
from itertools import combinations, pairwise, product
from pathlib import Path

import numpy as np
import pytest

from collectives.analysis.topology import LinkCost
from mpitrain.__main__ import main
from mpitrain.commands.search import refusal
from mpitrain.config import Config, Data, Model, expect_read, load
from mpitrain.search.axes import Axes
from mpitrain.search.by_layer import cheapest
from mpitrain.search.candidates import Candidate
from mpitrain.search.cuts import fastest_cut
from mpitrain.search.job import load_job, with_layout
from mpitrain.search.layers import LayerCost, layer_costs
from mpitrain.search.layouts import Search
from mpitrain.search.machine import Machine
from mpitrain.search.on_ranks import reason
from mpitrain.search.stages import Numerics, StageCosts
from mpitrain.search.sums import LayerSums
from tests.cases import mostly_slow


def every_cut(layers, counts, workers):
    """Every (first, stop, replicas) of every pipeline that uses all workers."""
    for pipe in range(1, min(workers, layers) + 1):
        for cuts in combinations(range(1, layers), pipe - 1):
            ends = [0, *cuts, layers]
            for replicas in product(counts, repeat=pipe):
                if sum(replicas) == workers:
                    yield list(zip(ends, ends[1:], replicas))


def drawings(quick):
    """Seeds, of which so many are quick."""
    return pytest.mark.parametrize("seed", mostly_slow(range(200), range(quick)))


@drawings(40)
def test_a_cut_is_the_fastest_of_all(seed):
    rng = np.random.default_rng(seed)
    layers, workers = int(rng.integers(1, 7)), int(rng.integers(1, 7))
    micro_batches = int(rng.integers(1, 9))
    counts = sorted({int(n) for n in rng.integers(1, workers + 1, 3)})
    shape = layers + 1, layers + 1
    seconds = {n: np.triu(rng.uniform(0.1, 1, shape).round(1), 1) for n in counts}
    for times in seconds.values():
        times[np.tril_indices(layers + 1)] = np.inf
    room = {
        (n, used): rng.uniform(size=shape) < 0.8 for n in counts for used in range(1, workers + 1)
    }
    best = np.inf
    for path in every_cut(layers, counts, workers):
        used = np.cumsum([replicas for *_, replicas in path[::-1]])[::-1]
        fits = all(
            room[replicas, after][first, stop]
            for after, (first, stop, replicas) in zip(used, path, strict=True)
        )
        own = [seconds[replicas][first, stop] for first, stop, replicas in path]
        if fits:
            best = min(best, sum(own) + (micro_batches - 1) * max(own))

    def fitting(replicas, used):
        return np.where(room[replicas, used], seconds[replicas], np.inf)

    found = fastest_cut(seconds, fitting, workers, micro_batches)
    assert (found is None) == (best == np.inf)
    if found is not None:
        assert found.seconds == pytest.approx(best)
        path = zip(stops(found.sizes), stops(found.sizes)[1:], found.replicas, strict=False)
        own = [seconds[replicas][first, stop] for first, stop, replicas in path]
        assert found.seconds == pytest.approx(sum(own) + (micro_batches - 1) * max(own))
        late = fastest_cut(seconds, fitting, workers, micro_batches, 0.999 * best)
        assert late is not None and late.seconds == np.inf
        again = fastest_cut(seconds, fitting, workers, micro_batches, 1.001 * best)
        assert again.seconds == pytest.approx(best)


def price(search, layout, path):
    """Seconds of a step of stages, or of chunks, that replicas take; infinite: beyond the memory.

    A layout of one width has ``layout.data`` replicas of each, which the path counts as one.
    """
    m, chunks, seconds = layout.micro_batches, layout.chunks, []
    for at, (first, stop, replicas) in enumerate(path):
        costs = search.costs(replace(layout, data=replicas) if layout.deals else layout)
        of = costs.sums.at((first, stop))
        if layout.deals:
            held = min(m, -(-sum(own for *_, own in path[at:]) // replicas))
        else:
            stage = layout.published.placement(layout.pipe, at)
            held = layout.published.held(layout.pipe, m, chunks, stage)
        activations = held * costs.activations(of) / chunks + costs.working / chunks
        if costs.state(of) + activations > search.machine.memory / chunks:
            return np.inf
        seconds.append(costs.seconds(of))
    idle = 1.0
    if layout.pipe > 1:
        costs = search.costs(layout)
        whole = costs.sums.whole
        f, b = costs.forward(whole), costs.backward(whole)
        w = (b - f * layout.recompute) / 2
        lost = layout.published.bubble(layout.pipe, m, chunks, f, b - w, w)
        idle = lost / (1 - lost) / (layout.pipe - 1) * m
    slowest = chunks * max(seconds)
    return m * slowest + idle * (sum(seconds) - slowest)


def drawn(rng):
    """A search for a small model of random layers on a few ranks, where memory is scarce or not."""
    layers = [
        LayerCost(
            str(at), *rng.uniform(1, 9, 6), summed=tuple(rng.uniform(1, 9, rng.integers(0, 3))),
            placed=0.5, tied=at * rng.integers(2), rows=rng.integers(2), keys=rng.integers(2),
            scores=rng.uniform(), fixed=rng.uniform() / 9,
        )
        for at in range(rng.integers(1, 6))
    ]  # fmt: skip
    ranks, links = int(rng.choice([1, 2, 3, 4])), rng.uniform(0, 0.3, 4)
    machine = Machine(
        ranks, int(rng.choice([1, ranks])), rng.uniform(1, 9), 99.0, rng.uniform(0, 0.1),
        rng.choice([np.inf, 400.0, 900.0]), LinkCost(*links[:2]), LinkCost(*links[2:]),
        call=rng.uniform(0, 0.2),
    )  # fmt: skip
    axes = Axes(*(int(rng.choice(own)) for own in ([0, 2, 4], [0, 8], [0, 2])), spread=False)
    numerics = Numerics(4, int(rng.choice([2, 4])), 2, rng.uniform(0, 0.01), rng.uniform(1, 99))
    if rng.integers(2) and not axes.positions:
        axes = replace(axes, rows=4)
        layers = [replace(one, behind=rng.uniform(), told=rng.uniform(0, 9)) for one in layers]
    return Search(layers, machine, int(rng.choice([2, 4, 6, 8])), numerics, axes)


@drawings(15)
def test_the_search_finds_the_cheapest_layout_of_all(seed):
    search = drawn(np.random.default_rng(seed))
    best, count, batch = np.inf, len(search.layers), search.batch
    for layout in search.candidates():
        widths = [n for n in range(1, layout.data + 1) if batch // layout.micro_batches % n == 0]
        parts = layout.data if layout.deals else layout.pipe * layout.chunks
        for path in every_cut(count, widths if layout.deals else [1], parts):
            best = min(best, price(search, layout, path))
    found = search.cheapest(1)
    assert bool(found) == (best < np.inf)
    if found:
        assert found[0][0] == pytest.approx(best)


def stops(sizes):
    """Where stages of these sizes begin, and where the last one ends."""
    return np.cumsum([0, *sizes]).tolist()


def gpt():
    """A model, and the costs of its layers."""
    text = Data(name="tokens", path="none", vocabulary=100, context=32)
    model = Model(kind="gpt", layers=4, width=64, heads=4)
    own = load_job(Config(data=text, model=model), "a test")
    return own.model, layer_costs(own.model, own.data.input_shape)


def test_operations_and_parameters_are_those_of_the_closed_forms():
    model, layers = gpt()
    n, d, t, v = 4, 64, 32, 100
    blocks = sum(layer.forward for layer in layers[1:-1])
    assert blocks == n * (2 * 12 * d * d * t + 4 * t * t * d)  # Narayanan et al. 2021, appendix
    assert layers[-1].forward == 2 * t * d * v
    assert sum(layer.parameters for layer in layers) == model.size
    assert layers[1].summed == (t * d,) * 4  # Enter and Leave of attention and of the perceptron


def test_what_a_forward_pass_keeps_is_what_it_really_saves():
    model, costs = gpt()
    x = np.random.default_rng(0).integers(0, 100, (3, 32))
    for cost, (name, layer) in zip(costs, model.layers.items(), strict=True):
        x, saved = layer.forward(model.drawn(name, 0, np, np.float32), x)
        kept = {id(array): array.size for array in arrays(saved)}
        if name.startswith("block"):
            own = cost.kept + cost.kept_shared + cost.scores
            assert own == pytest.approx(sum(kept.values()) / 3, rel=0.15)


def arrays(saved):
    """All arrays in nested tuples and lists."""
    if isinstance(saved, np.ndarray):
        yield saved
    elif isinstance(saved, list | tuple):
        for inner in saved:
            yield from arrays(inner)


def alike(count, **changed):
    """Layers of one kind."""
    values = {"forward": 1.0, "backward": 2.0, "kept": 10.0, "kept_shared": 0.0, "outputs": 5.0}
    values |= {"parameters": 100.0} | changed
    return [LayerCost(f"l{i}", **values) for i in range(count)]


def test_memory_is_shared_as_zero_and_recomputation_say():
    numerics = Numerics(stored=4, computed=4, slots=2)

    def memory(in_flight, **how):
        layout = Candidate(1, 4, 1, **how)
        costs = StageCosts(LayerSums.over(alike(4)), Machine(4, 4, 1.0), layout, 1.0, numerics)
        return costs.memory(costs.sums.whole, in_flight)

    state, kept = 4 * 400, 4 * 40
    assert memory(1) == 4 * state + kept
    assert memory(1, zero=1) == (2 + 2 / 4) * state + kept
    assert memory(1, zero=2) == (1 + 3 / 4) * state + kept
    assert memory(1, zero=3) == 4 / 4 * state + kept
    assert memory(3) == 4 * state + 3 * kept
    assert memory(3, recompute=True) == 4 * state + 3 * 4 * (10 + 3 * 5) + 4 * 10


def test_layouts_beyond_the_memory_are_told_of():
    tight = Search(alike(8), Machine(4, 4, 1.0, memory=9 * 800), 32, Numerics(4, 4, 2))
    assert tight.fastest(5) and any("GiB of a rank" in why for why in tight.refused)


@pytest.mark.parametrize(
    ("name", "why"), [("none/found.toml", "in a folder that is there"), (".", "is no file")]
)
def test_a_file_that_cannot_be_is_refused_before_the_search(name, why, tmp_path, capsys):
    words = ["search", "digits_mlp", "-n", "2", "--flops", "1e9", "-o", str(tmp_path / name)]
    with pytest.raises(SystemExit):
        main(words)
    told = capsys.readouterr()
    assert why in told.err
    assert not told.out


def zeroed(level, *, slow, buckets=1, copying=False, per_node=4):
    """Seconds of the update of 4 replicas of 1600 bytes of parameters, where a byte takes one."""
    link = LinkCost(0.0, 1.0)
    machine = Machine(4, per_node, 1.0 / slow, inside=link, network=link, copying=copying)
    numerics = Numerics(4, 4, 2, bucket=1600 / buckets)
    costs = StageCosts(LayerSums.over(alike(4)), machine, Candidate(1, 4, 1, zero=level), 1.0,
                       numerics)  # fmt: skip
    return costs.update(costs.sums.whole)


def test_a_backward_pass_hides_sums_but_for_the_last_bucket_and_no_gathers():
    part = 1600 * 3 / 4  # of a reduce-scatter, or an all-gather
    assert zeroed(0, slow=1e-9) == zeroed(0, slow=1e9) == pytest.approx(2 * part)
    assert zeroed(0, slow=1e9, buckets=4) == pytest.approx(2 * part / 4)
    assert zeroed(1, slow=1e9, buckets=4) == pytest.approx(part / 4 + part)
    assert zeroed(3, slow=1e9) == pytest.approx(part / 4 + 2 * part)
    # Cores that copy do not compute meanwhile; a network's adapter copies by itself.
    assert zeroed(0, slow=1e9, buckets=4, copying=True) == pytest.approx(2 * part)
    assert zeroed(0, slow=1e9, buckets=4, copying=True, per_node=1) == pytest.approx(2 * part / 4)


def test_rows_of_images_are_shared_where_that_is_faster(capsys):
    """Two samples on four ranks, of which tensor ranks share no image."""
    words = ["search", "digits_space", "-n", "4", "--flops", "1e6", "--set", "train.batch_size=2"]
    assert main([*words, "--top", "40"]) == 0
    told = capsys.readouterr().out
    assert " x space 4" in told
    assert "space" in told.partition("[parallel]")[2]


BOX = "-" * 74
ABORT = "MPI_ABORT was invoked on rank 1\n\nexactly when Open MPI kills them."
FAILED = {
    "x\nmpitrain: there is no job\n" + BOX: "there is no job",
    f"Traceback:\nValueError: mine\n{BOX}\n{ABORT}\n{BOX}\n\0": "ValueError: mine",
    f"{BOX}\nrank 1 exited on\nsignal 9 (Killed).\n{BOX}\n": "rank 1 exited on signal 9 (Killed).",
    "E: mine\nAbort(1) on node 1 (rank 1 in comm 0): application called MPI_Abort": "E: mine",
    f"\n{'=' * 83}\n=   BAD TERMINATION\n{'=' * 83}\nKilled (signal 9)": "= BAD TERMINATION Killed "
    "(signal 9)",
    "": "",
}


@pytest.mark.parametrize("told", FAILED)
def test_why_ranks_failed_is_no_line_of_a_launcher_s_box(told):
    assert reason(told) == FAILED[told]


def test_a_layout_that_hangs_as_it_is_timed_is_ended_and_told_of(tmp_path, monkeypatch, capsys):
    """Under an ``mpiexec`` whose ranks outlive it, and keep what it prints into."""
    script = tmp_path / "mpiexec"
    script.write_text('#!/bin/sh\nsleep 60 &\necho $! > "$0.pid"\nwait\n')
    script.chmod(0o755)
    monkeypatch.setenv("MPIEXEC", f"{script} --some-option")
    monkeypatch.setattr("mpitrain.search.on_ranks.START_S", 1.0)
    assert main(["search", "digits_mlp", "-n", "2", "--flops", "1e12", "--time", "1"]) == 2
    told = capsys.readouterr().err
    assert re.search(r"--some-option -n 2: ranks have not ended after \d+ s; leave --time", told)
    os.kill(int((tmp_path / "mpiexec.pid").read_text()), signal.SIGKILL)


@pytest.mark.parametrize(
    ("job", "options"),
    [
        ("mlp_asynchronous", ["parallel.weights=vertical", "parallel.window=8"]),
        ("gpt_context", ["parallel.attention=ring"]),
    ],
)
def test_keys_of_the_job_s_own_layout_do_not_stay_in_another_one(job, options):
    config = load(Path("jobs/examples") / f"{job}.toml", options)
    search = load_job(config, "a test").search(Machine(2, 2, 1e9), is_counted=True)
    for ran in search.fastest(3, refusal(config)):
        expect_read(with_layout(config, partition=ran.keys()["parallel.partition"],
                                **ran.layout.keys()))  # fmt: skip


def passes(way, context, **machine):
    """Seconds of a forward and of a backward pass of a layer of 10 keys and values."""
    layout = Candidate(1, 1, 1, context=context, attention=way)
    layers = alike(1, forward=0.0, backward=0.0, keys=10.0)
    cluster = Machine(context, context, 1.0, **{"inside": LinkCost(0.0, 0.0)} | machine)
    costs = Search(layers, cluster, 1, Numerics(1, 1, 0)).costs(layout)
    return costs.forward(costs.sums.whole), costs.backward(costs.sums.whole)


def test_context_ranks_talk_as_often_as_their_attention_does():
    """A pass of a stage is a call by itself."""
    assert passes("zigzag", 4, call=1.0) == (1 + 3, 1 + 3 + 3)
    assert passes("ulysses", 4, call=1.0) == (1 + 2, 1 + 2)
    one, byte = LinkCost(1.0, 0.0), LinkCost(0.0, 1.0)
    assert passes("zigzag", 4, inside=one) == (3, 3 + 3)
    assert passes("ulysses", 4, inside=one) == (2 * 3, 2 * 3)
    assert passes("zigzag", 4, inside=byte) == (10 * 3 / 4, 2 * 10 * 3 / 4)
    assert passes("ulysses", 4, inside=byte) == (2 * 10 * 3 / 16, 2 * 10 * 3 / 16)


@drawings(20)
def test_a_choice_by_layer_is_the_cheapest_of_all(seed):
    rng = np.random.default_rng(seed)
    layers, layouts = int(rng.integers(1, 8)), int(rng.integers(1, 4))
    seconds, memory = rng.integers(1, 9, (2, layers, layouts)).astype(float)
    moves = rng.integers(0, 4, (layers, layouts, layouts)).astype(float)
    limit = float(rng.choice([np.inf, 4 * layers, 1]))

    def cost(path):
        between = sum(moves[n, a, b] for n, (a, b) in enumerate(pairwise(path)))
        return seconds[range(layers), path].sum() + between

    every = map(list, product(range(layouts), repeat=layers))
    fitting = [path for path in every if memory[range(layers), path].sum() <= limit]
    total, path = cheapest(seconds, moves.__getitem__, memory, limit)
    assert total == min(map(cost, fitting), default=np.inf)
    assert (path in fitting and cost(path) == total) if fitting else not path


def test_layers_with_layouts_of_their_own_are_beside_the_best_layout_for_all(capsys):
    main(["search", "gpt_data", "-n8", "--nodes=2", "--flops=1e13", "--top=1", "--by-layer"])
    told = capsys.readouterr().out.partition("\nby layer: ")[2].splitlines()
    assert told[1].startswith("  embedding: data 2 x pipe 1 x tensor 4")
    assert told[2].startswith("  block0 to head: data 4 x pipe 1 x tensor 2")
    assert float(told[0].split()[0]) <= float(told[3].removeprefix("one for all: ").split()[0])
    assert told[4].startswith("the trainer gives all layers one layout")
