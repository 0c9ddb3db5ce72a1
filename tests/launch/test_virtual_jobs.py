"""Jobs on virtual ranks: losses bit for bit those of MPI ranks, a clock that is no accident."""

import json
import re

import pytest

from mpitrain.commands.arguments import parse
from mpitrain.pipeline.profiles import LayerProfile, write_profile
from tests.cases import slow_case
from tests.launch import programs
from tests.launch.programs import needs_digits, needs_launcher

pytestmark = needs_digits
SMALL = ("train.steps=3", "train.epochs=1")


def train(folder, run, job, *sets, options=(), ranks=None, **variables):
    given = [word for text in (f"run.dir={run}", *SMALL, *sets) for word in ("--set", text)]
    words = ("-m", "mpitrain", "train", job, *options, *given)
    done = programs.run(folder, *words, ranks=ranks, **variables)
    assert done.returncode == 0, done.stderr
    return done.stdout


def steps(run):
    lines = (run / "metrics.jsonl").read_text().splitlines()
    found = [record for record in map(json.loads, lines) if "grad_norm" in record]
    assert len(found) == 3
    return found


def numbers(run):
    return [(step["loss"], step["grad_norm"]) for step in steps(run)]


#: Layouts, and whether the MPI ranks' own sums must be ours, too, as those of three ranks are not.
LAYOUTS = [
    (2, "gpt_pipe", ("parallel.pipe=2", "parallel.schedule=1f1b"), {}),
    (3, "digits_mlp", ("parallel.zero=3",), {"COLLECTIVES_LINK": "cluster"}),
    (4, "gpt_3d", ("parallel.algorithm=ring",), {"COLLECTIVES_LINK": "cluster"}),
]


@pytest.mark.slow
@needs_launcher
@pytest.mark.parametrize(("ranks", "job", "sets", "variables"), LAYOUTS)
def test_losses_are_those_of_mpi_ranks(tmp_path, ranks, job, sets, variables):
    train(tmp_path, "real", job, *sets, ranks=ranks, **variables)
    out = train(tmp_path, "virtual", job, *sets, options=["--virtual", str(ranks)])
    assert numbers(tmp_path / "virtual") == numbers(tmp_path / "real")
    assert re.search(
        rf"{ranks} virtual ranks on network flat, .*, computing by CPU time: a step takes", out
    )


def profiled(folder, **seconds):
    """Writes a profile of layers; returns the options with which virtual ranks compute by it."""
    profile = [LayerProfile(name, *passes, 0, 0) for name, passes in seconds.items()]
    write_profile(folder / "costs.json", profile)
    return "--costs", "costs.json"


#: Ranks, a job and its keys, and the passes of the slowest rank in a row, of 20 ms a costly layer
#: and profiled micro-batch forward and backward.
COSTED = [
    # Four micro-batches, of which each replica has the half, and one more to fill two stages.
    slow_case(4, "gpt_3d", "parallel.pipe=2", (4 + 1) * 2 / 2),
    # Eight halves of micro-batches meet at the stage of one replica, and one fills the pipeline.
    slow_case(3, "gpt_3d", "parallel.replicas=[2,1]", (8 + 1) * 2 / 2),
    slow_case(2, "gpt_3d", "parallel.context=2", 4 * 4 / 2),
    (3, "gpt_3d", "server.ranks=1 server.bound=0 optim.clip_norm=0", 4 * 4 / 2),  # two workers
    # Eight micro-batches, of which each has an eighth of the batch.
    slow_case(3, "digits_mlp", "parallel.replicas=[2,1] train.micro_batches=4 model.hidden=[64,64]",
              8 / 2),
]  # fmt: skip


@pytest.mark.parametrize(("ranks", "job", "keys", "layers"), COSTED)
def test_costs_give_the_same_times_again_and_those_of_the_schedule(
    tmp_path, ranks, job, keys, layers
):
    """Costly layers are four blocks of the one job and the last of the other, whose passes take
    10 ms on a fourth of the batch."""
    free = dict.fromkeys(("embedding", "head", "layer0", "layer1"), (0.0, 0.0))
    costly = dict.fromkeys((*(f"block{number}" for number in range(4)), "layer2"), (0.01, 0.01))
    options = ("--virtual", str(ranks), *profiled(tmp_path, **free, **costly))
    own = ("pipe=1", "tensor=1", "sequence=false", "schedule=1f1b")
    sets = [*(f"parallel.{word}" for word in own), *keys.split()]
    found = []
    for run in ("first", "again") if "replicas" in keys else ("first",):
        train(tmp_path, run, job, *sets, options=options)
        found.append([step["seconds"] for step in steps(tmp_path / run)])
        assert (tmp_path / run / "report.html").exists()
    # Differences of a clock's readings, which are rounded by what came before the steps.
    assert found[0] == pytest.approx(found[-1], rel=1e-12)
    for seconds in found[0][1:]:  # the ranks begin the first one together
        assert layers * 0.02 < seconds < 1.02 * layers * 0.02


@pytest.mark.slow
def test_costs_of_a_client_are_those_of_its_batch(tmp_path):
    """Each of two ranks trains a client, whose samples are one batch; then at twice the costs."""
    for rounds in (1, 2):
        seconds = 0.01 * rounds, 0.02 * rounds
        options = ("--virtual", "2", *profiled(tmp_path, layer0=seconds, layer1=seconds))
        federated = (f"rounds={rounds}", "clients=2", "sample=2", "take=2", "dropout=0.0")
        sets = [word for key in federated for word in ("--set", f"federated.{key}")]
        sets += ["--set", "train.epochs=1", "--set", "train.batch_size=2000", "--resume"]
        done = programs.run(tmp_path, "-m", "mpitrain", "train", "federated", *options, *sets)
        assert f"computing by costs.json: a step takes {60 * rounds}" in done.stdout, done.stderr


@pytest.mark.parametrize(
    "words", ["--costs costs.json", "--slower 2", "--async-progress", "--virt 2"]
)
def test_real_ranks_are_given_nothing_that_they_would_not_read(words, capsys):
    with pytest.raises(SystemExit):
        parse(["train", "digits_mlp", *words.split()])
    assert words.split()[0] in capsys.readouterr().err


def test_costs_of_another_job_are_refused(tmp_path):
    words = ("train", "gpt_3d", "--virtual", "8", *profiled(tmp_path, block0=(0.01, 0.01)))
    done = programs.run(tmp_path, "-m", "mpitrain", *words)
    assert done.returncode == 2
    assert "mpitrain: --costs: the profile has no layer embedding" in done.stderr


def scaled(folder, *words):
    """Rows of ``mpitrain scale`` for the perceptron."""
    given = ("scale", "digits_mlp", "--steps", "3", "--json", "rows.json", *words)
    done = programs.run(folder, "-m", "mpitrain", *given)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "rows.json").read_text())["rows"]


@pytest.mark.slow
@pytest.mark.parametrize(("words", "factor"), [((), 1), (("--weak", "--until", "loss=9"), 4)])
def test_ranks_that_hardly_talk_scale(tmp_path, words, factor):
    """Passes take 90 ms on one rank."""
    costs = profiled(tmp_path, **dict.fromkeys(("layer0", "layer1", "layer2"), (0.01, 0.02)))
    network = ("--virtual", *costs, "--alpha", "0", "--bandwidth", "1e6")
    one, four = scaled(tmp_path, "-n", "1,4", *network, *words)
    assert (one["batch"], four["batch"]) == (64, 64 * factor)
    assert one["step_s"] == pytest.approx(0.09)
    assert four["step_s"] == pytest.approx(0.09 * factor / 4, rel=0.02)
    assert four["efficiency"] == pytest.approx(1, rel=0.02)
    assert (four["steps"] is not None) == bool(words)


@pytest.mark.slow
@needs_launcher
def test_real_ranks_scale_or_say_why_not(tmp_path):
    assert [row["ranks"] for row in scaled(tmp_path, "-n", "1,2")] == [1, 2]
    words = ("scale", "digits_mlp", "-n", "2", "--set", "parallel.pipe=3")
    done = programs.run(tmp_path, "-m", "mpitrain", *words)
    assert done.returncode == 2 and "-n 2: " in done.stderr and "parallel" in done.stderr
    assert not list(tmp_path.glob(".scale-*"))


@pytest.mark.slow
def test_more_than_eight_workers_push_with_a_warning(tmp_path):
    out = train(tmp_path, "late", "digits_mlp", "server.ranks=1", options=["--virtual", "10"])
    assert "warning: 9 groups push by themselves" in out
