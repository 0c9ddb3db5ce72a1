"""The partitioner against a brute force, and what plans print."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from mpitrain.auto_stages import auto_stages_on
from mpitrain.commands.plan import explain, predicted
from mpitrain.config import Config, ConfigError, Data, Model, Parallel, Train
from mpitrain.parallel.grid import Layout
from mpitrain.pipeline.partition import Costs, NoPartition, TwoLevelLinks, partition
from mpitrain.pipeline.profiles import LayerProfile, write_profile
from mpitrain.search.machine import Machine
from mpitrain.search.step import PredictedStep
from mpitrain.training.partition import partition_of
from tests.unit.mpitrain.test_search import every_cut


def drawn(rng, layers):
    sizes = [0, 1e3, 1e5, 1e6]
    return [
        LayerProfile(f"l{i}", *rng.uniform(0.1, 1, 2).tolist(), *rng.choice(sizes, 2).tolist())
        for i in range(layers)
    ]


def every(costs, layers, workers):
    """Seconds of every partition into contiguous stages with every number of replicas."""
    for path in every_cut(layers, range(1, workers + 1), workers):
        seconds, worker, before = 0.0, 0, 0
        for first, stop, count in path:
            if not costs.fits(first, stop, -(-(workers - worker) // count)):
                seconds = np.inf
            seconds = max(seconds, costs.stage(first, stop, count, worker))
            if worker:
                both = slice(worker - before, worker + count)
                seconds = max(seconds, costs.message(first - 1, both))
            worker, before = worker + count, count
        yield seconds


def path_of(found):
    return [(stage.first, stage.stop, stage.replicas) for stage in found.stages]


def test_the_optimum_is_that_of_a_brute_force():
    for seed in range(200):
        rng = np.random.default_rng(seed)
        layers, workers = rng.integers(1, 7).tolist(), rng.integers(1, 6).tolist()
        bandwidth = 1e6 if seed % 2 else 1e5
        memory = None if seed % 3 else 6e6
        nodes = [worker // 2 for worker in range(workers)] if seed % 5 else ()
        links = TwoLevelLinks(bandwidth, 5 * bandwidth, nodes)
        costs = Costs(drawn(rng, layers), links, memory, servers=not seed % 7, hidden=seed % 4 > 0)
        best = min(every(costs, layers, workers))
        if best == np.inf:
            with pytest.raises(NoPartition, match="do not fit"):
                partition(costs, workers)
            continue
        found = partition(costs, workers)
        assert found.seconds == pytest.approx(best, rel=1e-12), seed
        assert path_of(found) in every_cut(layers, range(1, workers + 1), workers)


def test_light_layers_are_replicated_and_heavy_weights_are_not():
    light = [LayerProfile(f"c{i}", 1, 2, 1e3, 1e2) for i in range(6)]
    costs = Costs([*light, LayerProfile("fc", 0.5, 1, 1e2, 1e10)], 1e8)
    assert costs.message(0) == 2 * 1e3 / 1e8  # an activation and its gradient
    assert partition(costs, 8).configuration == "7-1"


def test_balanced_partitions_have_the_fastest_slowest_stage():
    for seed in range(30):
        rng = np.random.default_rng(seed)
        profile, stages = drawn(rng, 7), int(rng.integers(1, 8))
        seconds = {
            tuple(path): max(sum(layer.seconds for layer in profile[a:b]) for a, b, _ in path)
            for path in every_cut(7, [1], stages)
        }
        found = path_of(partition(Costs(profile, np.inf), [1] * stages))
        assert seconds[*found] == pytest.approx(min(seconds.values())), seed


@pytest.mark.parametrize("schedule", ["1f1b", "asynchronous"])
def test_stages_that_are_chosen_for_a_batch_are_told_by_its_costs(tmp_path, schedule):
    """By data parallelism, 16 GB go and come once in eight micro-batches of 2 s."""
    profile = [LayerProfile(f"l{i}", 0.5, 0.5, 10, 4e9) for i in range(2)]
    write_profile(tmp_path / "p.json", profile)
    own = {"schedule": schedule, "links": (1.0, 1.0), "profile": str(tmp_path / "p.json")}
    job = Config(parallel=Parallel(partition="auto", **own), train=Train(micro_batches=8))
    _, text = auto_stages_on(job, [0, 1])
    assert "1-1: 1000.000 ms a micro-batch, 2.00x one worker, 20 B sent" in text
    assert "data parallelism: 2.00x, 2 GB" in text


MLP = Config(
    data=Data("digits"),
    model=Model(kind="mlp", hidden=(30, 20, 10)),
    train=Train(batch_size=32, micro_batches=4),
    parallel=Parallel(pipe=2, tensor=2),
)


def test_a_plan_says_who_does_what():
    text = explain(MLP, Machine(8, 8, 1.0))
    for words in (
        "8 ranks: data 2 x pipe 2 x tensor 2; 1f1b, 8 micro-batches (4 a replica) of 4 samples",
        "stage 0: ranks 0+1 2+3; layer0, layer1",
        "stage 1: ranks 4+5 6+7; layer2, layer3",
        f"  {64 * 30 + 30 + 30 * 20 + 20} parameters",
        "predicted with a core for each rank: ",
        " Gb/s to keep up with computing",
    ):
        assert words in text


def test_a_plan_of_more_ranks_than_samples_is_short():
    job = Config(data=Data("digits"), model=MLP.model, train=MLP.train)
    text = explain(job, Machine(200, 200, 1.0), is_counted=True)
    assert "; 1f1b, 800 micro-batches (4 a replica) of up to 1 sample, 768 of them empty\n" in text
    assert "stage 0: ranks 0 1 2 3 ... 199; " in text


def test_a_plan_divides_by_the_cores_that_there_are():
    """8 ranks that compute 75% of a second share the cores, whose work is the bound."""
    longer = PredictedStep(1.25, 1.0, 0.6, 0.25, (), {})
    step = replace(longer, seconds=1.0)
    assert predicted(longer, 60, 8, cores=8) == [
        "predicted with a core for each rank: 1250.00 ms a step, of which 250.00 ms communication, "
        "48 samples/s, bubble 25.0%"
    ]
    for cores, ms, rate in ("1 core", 6000, 10), ("2 cores", 3000, 20), ("7 cores", 1000, 60):
        (told,) = predicted(step, 60, 8, cores=int(cores[0]))[1:]
        found = f"{ms}.00 ms a step at best, {rate} samples/s"
        assert told == f"this machine has {cores} for 8 ranks: {found}"


def test_a_plan_that_cannot_be():
    many = Config(parallel=Parallel(pipe=10**9, data=10**6))
    with pytest.raises(ConfigError, match=f"pipe {10**9} x tensor 1 needs {10**15} ranks"):
        explain(many, Machine(6, 6, 1.0), is_counted=True)


def test_a_profile_of_another_model_is_refused(tmp_path):
    write_profile(tmp_path / "p.json", drawn(np.random.default_rng(0), 4))
    job = Config(parallel=Parallel(pipe=2, partition="auto", profile=str(tmp_path / "p.json")))

    outline = SimpleNamespace(layers=dict.fromkeys(("a", "b")))
    with pytest.raises(ConfigError, match=r"has the layers l0, l1, .*run mpitrain profile again"):
        partition_of(job, outline, Layout((1, 1)))
