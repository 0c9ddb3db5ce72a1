"""Predictions of ``mpitrain plan``: the search's own model of a step, in the job's layout."""

import random
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from benchmarks.seeds import ITERATIONS
from collectives.analysis.topology import LinkCost
from mpitrain import extras
from mpitrain.__main__ import main
from mpitrain.commands.arguments import parse
from mpitrain.commands.machine import machine
from mpitrain.commands.plan import explain, gigabits
from mpitrain.commands.search import refusal
from mpitrain.config import Config, load
from mpitrain.config.numbers import toml
from mpitrain.config.reading import converted
from mpitrain.metrics.words import digits
from mpitrain.pipeline.schedules import SCHEDULES
from mpitrain.search.job import load_job
from mpitrain.search.links import NodeLink
from mpitrain.search.machine import Machine
from mpitrain.search.planned import planned
from mpitrain.search.servers import ServerExchange
from mpitrain.search.whole import operations
from tests.cases import mostly_slow, slow_case

MACHINE = Machine(8, 4, 1e9, inside=LinkCost(1e-6, 1e-9), network=LinkCost(1e-5, 1e-8), call=1e-5)


def job(micro_batches=1, heads=4, mixture=0, tables=None, **parallel):
    """A gpt of 4 blocks, on 16 samples of 32 positions, without their text."""
    data = {"name": "tokens", "path": "none", "vocabulary": 50, "context": 32}
    model = {"kind": "gpt", "layers": 4, "heads": heads, "width": 64, "experts": mixture}
    train = {"batch_size": 16, "micro_batches": micro_batches}
    own = {"data": data, "model": model, "train": train, "parallel": parallel}
    return converted(own | (tables or {}), Config)


#: Model's experts, ranks, part of the layouts that is tried, and what the search finds at least.
_ALL = {"schedule": set(SCHEDULES) - {"gpipe", "asynchronous"}, "attention": {"zigzag", "ulysses"}}
_ALL |= {axis: {1, 2, 4} for axis in ("pipe", "tensor", "context")} | {"zero": {0, 1, 2, 3}}
TRIED = [
    (0, 8, 0.03, _ALL | {"sequence": {False, True}, "recompute": {False, True}}),
    slow_case(4, 8, 0.05, _ALL | {"experts": {1, 2, 4}}),
    (0, 3, 1.0, {"replicas": {(), (2, 1), (1, 2)}}),
]


@pytest.mark.parametrize(("experts", "ranks", "part", "axes"), TRIED)
def test_a_layout_that_the_search_finds_has_the_plan_that_it_predicted(experts, ranks, part, axes):
    """The trainer's own grid, cut and schedule are made of each layout."""
    own = load_job(job(mixture=experts), "plan")
    search = own.search(replace(MACHINE, ranks=ranks), is_counted=True)
    refuses, rng = refusal(own.config), random.Random(ranks)
    found = search.fastest(600, lambda own: refuses(own) or "not drawn" * (rng.random() > part))
    assert len(found) < 600
    for axis, values in axes.items():
        assert {getattr(ran.layout, axis) for ran in found} >= values
    for ran in found:
        tables = {}
        for key, value in ran.keys().items():
            table, name = key.split(".")
            tables.setdefault(table, {})[name] = value
        config = job(**tables["train"], mixture=experts, **tables["parallel"])
        step = planned(own, search, config).step
        assert step.seconds == pytest.approx(ran.step.seconds)
        assert step.memory == pytest.approx(ran.step.memory)
        assert step.sent == pytest.approx(ran.step.sent)


#: Jobs, and words of what the search says of layouts that their methods refuse.
JOBS = [
    ("digits_mlp", ["train.batch_size=64", "compress.codec='powersgd:rank=2'"], "ZeRO-2 needs"),
    ("resnet", ["train.batch_size=32"], ""),
    ("digits_space", ["train.batch_size=2"], ""),
    ("recommender", ["train.batch_size=64"], ""),
    ("gpt_experts", ["parallel.experts=1", "sync.combine='adasum'"], "adasum needs"),
    ("gpt_3d", ["compress.codec='int8'"], "ZeRO-3 needs"),
]


QUICK = ("digits_mlp", "gpt_experts")


@pytest.mark.parametrize(("name", "sets", "why"), mostly_slow(JOBS, lambda job: job[0] in QUICK))
def test_a_job_can_be_loaded_in_each_layout_that_the_search_proposes(name, sets, why):
    config = load(Path(name), sets)
    own = load_job(config, "mpitrain search")
    search = own.search(replace(MACHINE, ranks=4), is_counted=True)
    found = search.fastest(150, refusal(config))
    assert found
    assert not why or any(why in reason for reason in search.refused)
    for ran in found:
        chosen = [f"{key}={toml(value)}" for key, value in ran.keys().items()]
        step = planned(own, search, load(Path(name), [*sets, *chosen])).step
        assert step.seconds == pytest.approx(ran.step.seconds)


AVERAGED = {"kind": "local", "period": 10, "state": "averaged"}
#: Keys of a job beside its layout, and its gradients' bytes over those of a plain all-reduce.
EXCHANGES = [
    ({"compress": {"codec": "bf16", "least": 0}}, {"zero": 1}, 0.75),
    ({"sync": AVERAGED}, {}, 0.2),
    ({"sync": AVERAGED, "optim": {"average": 0.9}}, {}, 0.2),  # each worker keeps its own
]


def only(config, *shape):
    """Refuses layouts of another shape."""
    refuses = refusal(config)

    def why(own):
        other = (own.data, own.zero, own.micro_batches, own.recompute) != shape
        return refuses(own) or "another" * other

    return why


@pytest.mark.parametrize(("tables", "parallel", "times"), EXCHANGES)
def test_what_replicas_exchange_is_priced(tables, parallel, times):
    """Eight replicas on two nodes, in the search and in the plan."""
    found = []
    for config in (job(), job(**parallel, tables=tables)):
        own = load_job(config, "plan")
        search = own.search(MACHINE, is_counted=True)
        step = planned(own, search, config).step
        (ran,) = search.fastest(1, only(config, 8, config.parallel.zero, 1, False))
        assert (ran.step.seconds, ran.step.memory) == (step.seconds, step.memory)
        found.append(step)
    ratio = found[1].sent["gradients"] / found[0].sent["gradients"]
    assert ratio == pytest.approx(times, rel=0.02)


def step_of(config, machine=MACHINE):
    """Prediction of a plan for a step, and the bytes of the model's parameters."""
    own = load_job(config, "plan")
    return planned(own, own.search(machine, is_counted=True), config).step, 4 * own.model.size


def test_workers_that_meet_rarely_wait_for_a_part_of_an_exchange():
    """In each tenth step, an all-reduce that no backward pass hides."""
    config = job(tables={"sync": {"kind": "local", "period": 10}})
    step, nbytes = step_of(config, replace(MACHINE, call=0.0))
    every = 2 * 7 * (MACHINE.network.alpha + MACHINE.network.beta * nbytes / 8)
    assert step.seconds - step.computing == pytest.approx(every / 10)
    late, _ = step_of(job(tables={"sync": {"kind": "delayed", "period": 10, "delay": 10}}))
    assert late.seconds - late.computing < every / 10
    # Weights, gradients, velocity; the anchor, means, and the updates under way.
    assert late.memory[0] - step.memory[0] == pytest.approx(2 * nbytes)


def sent(**changed):
    """Bytes that a rank sends, by purpose, and those of its parameters."""
    step, nbytes = step_of(job(**changed))
    return {key: value for key, value in step.sent.items() if value}, nbytes


@pytest.mark.parametrize(("zero", "times"), [(0, 2), (1, 2), (2, 4 + 1), (3, 3 * 4)])
def test_gradients_and_parameters_are_sent_as_zero_says(zero, times):
    found, nbytes = sent(zero=zero, micro_batches=4)
    assert found == {"gradients": pytest.approx(times * nbytes * 7 / 8)}


def test_ranks_send_what_their_groups_share():
    """Numbers of a batch of 16 samples, of 32 positions and a width of 64."""
    activation, blocks = 4 * 16 * 32 * 64, 4
    found, nbytes = sent(tensor=8, heads=8)
    of_loss = 3 / 64  # a maximum, a sum and a score of each position's
    expected = 2 * 7 / 8 * activation * (4 * blocks + 2 + of_loss)
    assert found == {"tensor": pytest.approx(expected)}
    found, _ = sent(pipe=4, data=2)
    assert found["pipe"] == activation  # half of the samples, to two neighbours
    found, nbytes = sent(context=8)
    assert found["context"] == pytest.approx(7 / 8 * 3 * 2 * activation * blocks)
    assert found["gradients"] == pytest.approx(2 * 7 / 8 * nbytes)
    found, _ = sent(pipe=2, data=4, schedule="zb_v")
    assert found["pipe"] == 2 * activation / 4  # the tip of the V stays on its rank


#: Purpose, bytes of all that is sent over those of a forward pass, and a job on 8 ranks.
EXCHANGED = [
    ("context", 3, job(context=8)),
    ("context", 2, job(context=4, attention="ulysses")),
    ("context", 2, load(Path("digits_space"))),
    ("experts", 2, job(mixture=4, experts=4)),
    ("tensor", 2, job(tensor=4)),
]


@pytest.mark.parametrize(("purpose", "passes", "config"), EXCHANGED)
def test_what_is_computed_again_is_exchanged_again(purpose, passes, config):
    again = structs.replace(config, parallel=structs.replace(config.parallel, recompute=True))
    once, more = (step_of(one)[0].sent[purpose] for one in (config, again))
    assert more == pytest.approx((passes + 1) / passes * once)


def test_calls_and_latencies_are_paid_for_each_message():
    def beside_computing(machine, **parallel):
        """In calls, without the two of each of four micro-batches."""
        step, _ = step_of(job(4, **parallel), machine)
        return (step.seconds - step.computing) / machine.call - 2 * 4

    assert beside_computing(Machine(1, 1, 1e9, call=1e-3)) == pytest.approx(0, abs=1e-9)
    free = LinkCost(0.0, 0.0)
    two = Machine(2, 2, 1e9, inside=free, network=free, call=1e-3)
    # Sums of four a block, of the embedding, the head and, twice, the loss; or two calls for each.
    for sequence, calls in ((False, 4 * 4 + 2 + 2), (True, 2 * (4 * 4 + 2 + 2))):
        assert beside_computing(two, tensor=2, sequence=sequence) == pytest.approx(4 * calls)
    layers = 6
    for zero, calls in ((0, 1), (2, layers * (4 + 1)), (3, layers * 3 * 4)):
        assert beside_computing(two, zero=zero) == pytest.approx(calls)


@pytest.fixture
def plan(capsys):
    """Function that gives the words of a plan, or of its error if that is asked for."""

    def told(words, status=0):
        assert main(["plan", *shlex.split(words)]) == status
        return capsys.readouterr()[status > 0]

    return told


def test_layouts_stand_side_by_side(plan):
    words = "digits_mlp -n 4 --set train.batch_size=64 --flops 1e9 "
    words += "--set parallel.zero=3 --set parallel.prefetch=false --against "  # of its own layout
    told = plan(words + "data=2,pipe=2 --against 'tensor=4 zero=0'")
    rows = told.split("sent a rank  layout\n")[1].splitlines()
    assert [row.split("  ")[-1].split(",")[0] for row in rows] == [
        "data 4 x pipe 1 x tensor 1",
        "data 2 x pipe 2 x tensor 1",
        "data 1 x pipe 1 x tensor 4",
    ]
    assert "data 3 x pipe 1 x tensor 1 needs 3 ranks" in plan(words + "data=3", 2)
    assert "did you mean" in plan(words + "dat=4", 2)


def test_a_tied_tensor_of_a_stage_counts_once(plan):
    whole = plan("gpt_data --flops 1e9 -n 1")
    assert "  209024 parameters, " in whole and "this machine has" not in whole
    told = plan("gpt_data --flops 1e9 -n 2 --set parallel.pipe=2")
    stages = re.findall(r"^  (\d+) parameters", told, re.MULTILINE)
    assert sum(map(int, stages)) == 209024 + 76 * 64


def test_servers_wait_at_their_links():
    """One of 8 ranks serves 7 of 0.1 s each, at 1 GB/s, or several do."""
    served = ServerExchange(Machine(8, 8, 1.0, inside=LinkCost(0.0, 1e-9)), 1e8, 0.7)
    assert served.seconds(1) == pytest.approx(0.1 + 2 * 7 * 0.1)
    assert served.seconds(4) == pytest.approx(0.7 / 4 + 2 * 0.1)
    assert served.best() == 4
    free = replace(served, synchronous=False)
    assert free.seconds(1) == pytest.approx(0.7)  # the link of the server is busy all the time
    assert free.seconds(4) == pytest.approx(0.7 / 4 + 2 * 0.1)
    rare = replace(free, pulls=1 / 10, pushes=1 / 10)
    assert rare.seconds(1) == pytest.approx(0.1 + 0.2 * 0.1)
    assert replace(rare, fixed_seconds=3.0).seconds(1) == pytest.approx(3.1 + 0.2 * 0.1)
    # A server steps once for all workers, or for each of them; codes are a part of the bytes.
    assert replace(served, stepping=0.4).seconds(4) == pytest.approx(0.7 / 4 + 2 * 0.1 + 0.4 / 4)
    assert replace(free, stepping=0.4).seconds(1) == pytest.approx(0.7 + 7 * 0.4)
    assert replace(served, coded=0.5).seconds(4) == pytest.approx(0.7 / 4 + 1.5 * 0.1)


@pytest.mark.parametrize(
    ("words", "told", "link", "call"),
    [
        ([], "--inside 0,2 --call 30", LinkCost(0.0, 5e-10), 3e-5),
        (["--inside", "1,4"], "--call 30", LinkCost(1e-6, 2.5e-10), 3e-5),
        (["--call", "7"], "--inside 0,2", LinkCost(0.0, 5e-10), 7e-6),
    ],
)
def test_what_is_not_given_of_a_machine_is_measured(monkeypatch, capsys, words, told, link, call):
    monkeypatch.setattr("mpitrain.commands.machine.measured", lambda _: NodeLink(3e-5, 5e-10))
    found = machine(parse(["plan", "digits_mlp", "-n", "2", *words]))
    assert capsys.readouterr().out == f"measured here: {told}\n"
    assert (found.inside.alpha, found.inside.beta) == pytest.approx((link.alpha, link.beta))
    assert found.call == pytest.approx(call)


def test_what_does_not_fit_in_memory_is_said(plan):
    words = "digits_mlp -n 4 --flops 1e9 --set train.batch_size=64 --against pipe=2,data=2"
    told = plan(words)
    assert "beyond" not in told
    held = [float(row.split()[4]) for row in told.splitlines() if "  data " in row]
    assert held[1] < held[0]
    told = plan(f"{words} --memory {sum(held) / 2}")
    assert f"beyond --memory: a rank of stage 0 holds {held[0]:.3g} GiB" in told
    rows = [row for row in told.splitlines() if "  data " in row]
    assert ["beyond --memory" in row for row in rows] == [True, False]
    told = plan(f"{words} --memory {held[1] / 2}")
    assert told.count("micro-batches, beyond --memory") == 2
    told = plan("server -n 3 --flops 1e9 --memory 1e-5")
    assert all(f"beyond --memory: a {role} holds" in told for role in ("worker", "server"))


def test_a_plan_of_servers(plan):
    told = plan("server -n 3 --flops 1e9")
    assert "3 ranks: 2 workers, 1 server, asynchronous" in told
    assert "a worker pulls 35.9 kB and pushes 35.9 kB a step; a server moves 144 kB" in told
    assert "operations for each byte of gradients" in told
    line = plan("digits_mlp -n 8 --flops 1e12 --network 50,1").splitlines()[-1]
    assert "1.00 times this sum of gradients'" in line and "; take" not in line
    assert "leaves no worker; start 2 ranks or more" in plan("server -n 1", 2)
    told = plan("server -n 3 --flops 1e9 --against recompute=true", 2)
    assert "--against: workers and servers have one layout" in told


OWN = """
import torch

def model():
    return torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))

def data():
    x = torch.randn(64, 8)
    return torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)), None
"""
JOB = """
own = {model = "mine.py:model", data = "mine.py:data"}
loss.name = "mean_squared_error"
train = {batch_size = 16, epochs = 1}
optim.name = "sgd"
"""


@pytest.mark.slow
def test_a_model_of_the_program_is_timed(tmp_path, plan):
    pytest.importorskip("torch")
    (tmp_path / "mine.py").write_text(OWN)
    file = tmp_path / "job.toml"
    file.write_text(JOB)
    told = plan(f"{file} -n 2 --against pipe=2")
    work, weights = 3 * 2 * (8 * 64 + 64), 8 * 64 + 64 + 64 + 1
    assert f"{weights} parameters" in told and "data 1 x pipe 2 x tensor 1" in told
    assert f"arithmetic intensity: {digits(8 * work / (4 * weights))} operations" in told
    assert f"{64 * work:.3g} operations" in told
    assert main(["search", str(file), "-n", "2"]) == 0
    assert "has no shapes to count operations from" in plan(f"{file} -n 2 --flops 1e9", 2)


def test_operations_of_attention_are_counted_forward_and_backward():
    torch = pytest.importorskip("torch")
    x = torch.randn(1, 2, 8, 4, requires_grad=True)
    attend = torch.nn.functional.scaled_dot_product_attention
    product = 2 * 2 * 8 * 8 * 4  # of each of two heads
    assert extras.counted(lambda: attend(x, x, x)) == 2 * product
    passes = extras.counted(lambda: torch.autograd.grad(attend(x, x, x).sum(), x))
    assert passes == 7 * product  # one of the scores again


def test_a_measured_step_gives_the_bandwidth_and_the_hours_of_the_training():
    config = job(tables={"train": {"batch_size": 16, "steps": 7200}})
    own = load_job(config, "plan")
    two = replace(MACHINE, ranks=2, per_node=2, inside=LinkCost(0.0, 0.0), call=0.0)
    told = explain(config, two, is_counted=True, step_s=0.5)
    assert f"gradients: {digits(8e-9 * 4 * own.model.size / 0.5)} Gb/s to keep up" in told
    work = 16 * 7200 * operations(own)
    assert f"whole training: 7200 steps, {work:.3g} operations, 1 hours" in told
    five = replace(two, ranks=5, per_node=5)
    coded, served = {"compress": {"codec": "int8"}}, {"server": {"ranks": 1, "bound": 0}}
    for tables, cluster in ((coded, replace(two, stream=1e6)), (served, five)):
        told = explain(job(tables=tables), cluster, is_counted=True, step_s=0.5)
        assert ": 500.00 ms a step" in told


@pytest.mark.parametrize(("millions", "milliseconds", "published"), ITERATIONS.values())
def test_the_bandwidth_of_published_steps_is_the_published_one(millions, milliseconds, published):
    assert round(gigabits(4e6 * millions, 1e-3 * milliseconds), 1) == published
