"""The configurations of PipeDream's Table 1 as jobs on virtual ranks: losses, and bytes."""

import json
from math import lcm

import numpy as np
import pytest

from mpitrain import data, models
from mpitrain.config import load
from mpitrain.pipeline.partition import Costs, StagePlan
from mpitrain.pipeline.profiles import LayerProfile
from mpitrain.search.layers import layer_costs
from tests.cases import slow_case
from tests.launch.programs import needs_digits, run_text
from tests.mpi.mpitrain.stale import simulated

pytestmark = needs_digits

STEPS = 4
#: As in VGG-16, convolutions do the work and linear layers have the parameters.
JOB = """
[run]
seed = 3
dtype = "float64"
[data]
name = "digits"
[model]
kind = "vgg"
channels = [4, 8]
hidden = [48]
[optim]
lr = 0.05
[train]
steps = 4
batch_size = {batch}
[parallel]
schedule = "asynchronous"
algorithm = "ring"
window = 2
replicas = {replicas}
partition = {partition}
"""
PROGRAM = """
import json, sys
from pathlib import Path
from collections import Counter
from collectives.virtual import VirtualCluster, install
install()
from collectives.analysis.topology import LinkCost, build
from collectives.virtual import here
from mpi4py import MPI
from mpitrain.config import load
from mpitrain.pipeline.mailbox import Mailbox
from mpitrain.pipeline.runtime import Runner
from mpitrain.start import start

sent, traffic = Counter(), {}
send, run = Mailbox.send, Runner.run

def counted_send(self, array, *given, **named):
    sent["messages"] += array.nbytes
    return send(self, array, *given, **named)

def counted_run(self, *given):
    own = traffic[here().number]
    before = own.sent
    found = run(self, *given)
    sent["sums"] += own.sent - before
    return found

Mailbox.send, Runner.run = counted_send, counted_run

def rank():
    with start(MPI.COMM_WORLD, load(Path(sys.argv[1]))) as loop:
        traffic[here().number] = loop.parts.comm.traffic
        return [record.loss for record in loop.run_epoch(0)]

ranks = int(sys.argv[2])
cluster = VirtualCluster(ranks, build("flat", ranks, LinkCost(1e-6, 1e-9)), measures=False)
losses = cluster.run(rank)
assert all(own == losses[0] for own in losses)
print(json.dumps({"losses": losses[0], **sent}))
"""

ROWS = [
    pytest.param([2, 1, 1], [2, 1, 1], id="2-1-1"),
    slow_case([1, 1, 1, 1], [1, 1, 1, 1], id="straight"),
    slow_case([8], [4], id="8"),
    slow_case([7, 1], [2, 2], id="7-1"),
    slow_case([9, 5, 1, 1], [1, 1, 1, 1], id="9-5-1-1"),
]


@pytest.mark.parametrize(("replicas", "partition"), ROWS)
def test_losses_are_those_of_stashed_weights_and_bytes_those_of_the_partitioner(
    tmp_path, replicas, partition
):
    parts, samples, job = lcm(*replicas), 2, tmp_path / "job.toml"
    job.write_text(JOB.format(batch=parts * samples, replicas=replicas, partition=partition))
    done = run_text(tmp_path, PROGRAM, job, sum(replicas))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    config = load(job)
    expected, _ = simulated(config, STEPS, ranks=sum(replicas))
    np.testing.assert_allclose(found["losses"], expected, rtol=1e-10)
    digits = data.load(config.data, config.run.dtype)
    profile = [
        LayerProfile(layer.name, 0.0, 0.0, 8 * samples * layer.outputs, 8 * layer.parameters)
        for layer in layer_costs(models.build(config, digits), digits.input_shape)
    ]
    ends = np.cumsum([0, *partition]).tolist()
    stages = [StagePlan(*own, 0.0) for own in zip(ends, ends[1:], replicas)]
    told = found.get("messages", 0) + found.get("sums", 0)
    assert told == STEPS * parts * Costs(profile, 1.0).sent(stages)
