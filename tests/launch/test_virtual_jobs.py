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
    """Output of ``mpitrain train``."""
    given = [word for text in (f"run.dir={run}", *SMALL, *sets) for word in ("--set", text)]
    words = ("-m", "mpitrain", "train", job, *options, *given)
    done = programs.run(folder, *words, ranks=ranks, **variables)
    assert done.returncode == 0, done.stderr
    return done.stdout


def steps(run):
    """The records of the steps."""
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
        rf"{ranks} virtual ranks on network flat, .*, computing by CPU time: a step takes",
        out,
    )


#: Ranks, keys of the job, and the passes of the slowest rank in a row, of 20 ms a block and
#: profiled micro-batch forward and backward.
COSTED = [
    # Four micro-batches, of which each replica has the half, and one more to fill two stages.
    slow_case(4, "parallel.pipe=2", (4 + 1) * 2 / 2),
    # Eight halves of micro-batches meet at the stage of one replica, and one fills the pipeline.
    slow_case(3, "parallel.replicas=[2,1]", (8 + 1) * 2 / 2),
    slow_case(2, "parallel.context=2", 4 * 4 / 2),
    (3, "server.ranks=1 server.bound=0 optim.clip_norm=0", 4 * 4 / 2),  # two workers
]


@pytest.mark.parametrize(("ranks", "keys", "blocks"), COSTED)
def test_costs_give_the_same_times_again_and_those_of_the_schedule(tmp_path, ranks, keys, blocks):
    """Four blocks whose passes take 10 ms on a fourth of the batch."""
    profile = [LayerProfile(name, 0.0, 0.0, 0, 0) for name in ("embedding", "head")]
    profile += [LayerProfile(f"block{number}", 0.01, 0.01, 0, 0) for number in range(4)]
    write_profile(tmp_path / "costs.json", profile)
    own = ("pipe=1", "tensor=1", "sequence=false", "schedule=1f1b")
    sets = [*(f"parallel.{word}" for word in own), *keys.split()]
    options = ("--virtual", str(ranks), "--costs", "costs.json")
    found = []
    for run in ("first", "again") if "replicas" in keys else ("first",):
        train(tmp_path, run, "gpt_3d", *sets, options=options)
        found.append([step["seconds"] for step in steps(tmp_path / run)])
        assert (tmp_path / run / "report.html").exists()
    # Differences of a clock's readings, which are rounded by what came before the steps.
    assert found[0] == pytest.approx(found[-1], rel=1e-12)
    for seconds in found[0][1:]:  # the ranks begin the first one together
        assert blocks * 0.02 < seconds < 1.02 * blocks * 0.02


@pytest.mark.slow
def test_costs_of_a_part_of_a_batch_on_stages_of_unequal_width(tmp_path):
    """The profile has a fourth of the batch, and each of the eight micro-batches an eighth."""
    profile = [LayerProfile(f"layer{number}", 0.0, 0.0, 0, 0) for number in range(2)]
    write_profile(tmp_path / "costs.json", [*profile, LayerProfile("layer2", 0.01, 0.01, 0, 0)])
    sets = ("parallel.replicas=[2,1]", "train.micro_batches=4", "model.hidden=[64,64]")
    train(tmp_path, "run", "digits_mlp", *sets, options=("--virtual", "3", "--costs", "costs.json"))
    for step in steps(tmp_path / "run"):
        assert 8 * 0.01 < step["seconds"] < 1.02 * 8 * 0.01


@pytest.mark.slow
def test_costs_of_a_client_are_those_of_its_batch(tmp_path):
    """Each of two ranks trains a client, whose samples are one batch; then at twice the costs."""
    for rounds in (1, 2):
        seconds = 0.01 * rounds, 0.02 * rounds
        profile = [LayerProfile(f"layer{number}", *seconds, 0, 0) for number in range(2)]
        write_profile(tmp_path / "costs.json", profile)
        federated = (f"rounds={rounds}", "clients=2", "sample=2", "take=2", "dropout=0.0")
        sets = [word for key in federated for word in ("--set", f"federated.{key}")]
        sets += ["--set", "train.epochs=1", "--set", "train.batch_size=2000", "--resume"]
        options = ("--virtual", "2", "--costs", "costs.json")
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
    write_profile(tmp_path / "costs.json", [LayerProfile("block0", 0.01, 0.01, 0, 0)])
    words = ("train", "gpt_3d", "--virtual", "8", "--costs", "costs.json")
    done = programs.run(tmp_path, "-m", "mpitrain", *words)
    assert done.returncode == 2
    assert "mpitrain: --costs: the profile has no layer embedding" in done.stderr


PROGRAM = """
from mpi4py import MPI
from collectives import Communicator
import numpy as np
comm = Communicator(MPI.COMM_WORLD)
total = np.empty(1000)
comm.Allreduce(np.full(1000, comm.rank + 1.0), total, algorithm="ring")
print(comm.rank, total[0], total[-1])
MPI.COMM_WORLD.recv(source=(comm.rank + 1) % comm.size)
"""


def virtual(folder, program=PROGRAM):
    (folder / "program.py").write_text(program)
    words = ("-m", "collectives.virtual", "-n", "5", "program.py")
    return programs.run(folder, *words, ranks=None, PYTHONUNBUFFERED="")


def test_ranks_that_wait_for_one_another_are_named(tmp_path):
    done = virtual(tmp_path)
    assert done.returncode != 0
    for rank in range(5):
        assert f"rank {rank}" in done.stderr
        assert f"{rank} 15.0 15.0" in done.stdout
    assert "program.py" in done.stderr


USUAL = """
from dataclasses import dataclass
from mpi4py import MPI
import sys, time

@dataclass
class Own:
    rank: int

def main():
    comm, clocks = MPI.COMM_WORLD, (MPI.Wtime, time.perf_counter, time.monotonic)
    begun = [clock() for clock in clocks] + [1e-9 * time.perf_counter_ns()]
    time.sleep(500)
    last = comm.bcast(Own(comm.rank), root=comm.size - 1)
    took = [clock() for clock in clocks] + [1e-9 * time.perf_counter_ns()]
    print(isinstance(last, Own), last.rank, [round((b - a) / 100) for a, b in zip(begun, took)])
    MPI.Finalize()
    return 0

sys.exit(main())
"""


def test_a_program_has_its_classes_its_clocks_and_its_end(tmp_path):
    done = virtual(tmp_path, program=USUAL)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["True 4 [5, 5, 5, 5]"] * 5
    assert "waiting" in done.stderr


def scaled(folder, *words):
    """Rows of ``mpitrain scale`` for the perceptron, whose passes take 90 ms on one rank."""
    profile = [LayerProfile(f"layer{number}", 0.01, 0.02, 0, 0) for number in range(3)]
    write_profile(folder / "costs.json", profile)
    given = ("scale", "digits_mlp", "--steps", "3", "--json", "rows.json", *words)
    done = programs.run(folder, "-m", "mpitrain", *given)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "rows.json").read_text())["rows"]


@pytest.mark.slow
@pytest.mark.parametrize(("words", "factor"), [((), 1), (("--weak", "--until", "loss=9"), 4)])
def test_ranks_that_hardly_talk_scale(tmp_path, words, factor):
    network = ("--virtual", "--costs", "costs.json", "--alpha", "0", "--bandwidth", "1e6")
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
