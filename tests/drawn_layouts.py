"""Drawn layouts, several axes at a time, against one process.

    mpiexec -n 8 python -m tests.drawn_layouts --rounds 50
    PYTHONPATH=. python -m collectives.virtual -n 8 tests/drawn_layouts.py --rounds 50

Each round draws a job and two layouts.  The first one trains as one process does (an asynchronous
pipeline: as the simulation of its stale weights) and goes on from a checkpoint with the same bits.
The second one goes on from there as one process does.
"""

import argparse
import faulthandler
import re
import shutil
import sys
import tempfile
from collections import Counter
from itertools import pairwise
from pathlib import Path
from random import Random

import numpy as np
from mpi4py import MPI
from msgspec.structs import asdict, replace

from collectives import Communicator
from mpitrain.checkpoint.saving import resume
from mpitrain.config import Config, ConfigError, Data, Model, Optim, Parallel, Run, Train
from mpitrain.start import start
from tests.mpi.mpitrain.layouts import TEXT, changed, keep, whole
from tests.mpi.mpitrain.stale import simulated

STEPS, MOST = 4, 1e-10
V = ("zb_v", "v_half", "v_min", "dualpipe_v")
SGD = Optim(lr=0.05, reference_batch=0, momentum=0.5, weight_decay=0.01)
ADAMW = Optim("adamw", lr=1e-3, reference_batch=0, weight_decay=0.1, clip_norm=1.0, average=0.9)
LAMB = Optim("lamb", lr=1e-3, reference_batch=0, weight_decay=0.01)
LARS = Optim("lars", lr=1.0, reference_batch=0, weight_decay=1e-4, trust=0.01)


def drawn_job(rng: Random, ranks: int) -> Config:
    """A small job that so many ranks can share along any axis."""
    kind, wide = rng.choice(["gpt", "gpt", "convnet", "resnet", "vgg"]), 2 * max(2, ranks)
    data, model = Data("digits"), Model(kind, channels=(8, 8, 8)[: rng.randint(2, 3)])
    if kind == "gpt":
        data = Data("text", path=str(TEXT), context=wide + rng.choice((0, 0, 3)))
        model = Model(
            kind, width=wide, heads=wide // 2, layers=rng.choice((2, 2, ranks, 2 * ranks))
        )
        model = replace(model, dropout=rng.choice((0, 0.2)))
        if experts := rng.choice((0, 3, 5)):
            model = replace(model, experts=experts, top=rng.choice((1, 2)), capacity=1.0)
            model = replace(model, balance=0.1, router_z=0.01)
    elif kind != "resnet":
        model = replace(model, hidden=(8,) * rng.choice((1, 2, ranks)))
    train = Train(epochs=1, steps=STEPS, batch_size=rng.choice((24, 17, 5)))
    run = Run(seed=rng.randint(1, 3), dtype="float64")
    optim = rng.choice((SGD, ADAMW, LAMB, LARS))
    return Config(run=run, data=data, model=model, optim=optim, train=train)


def drawn_layout(
    rng: Random, job: Config, comm: MPI.Intracomm, refused: Counter[str], *, stale: bool
) -> Config:
    """The job in a layout whose methods go together; counts those that the job's tables refuse."""
    axes, left, has = ["data", "pipe", "tensor", "inner"], comm.size, job.model
    sizes = dict.fromkeys(axes, 1)
    for factor in (2, 3, 5, 7):
        while left % factor == 0:
            left //= factor
            sizes[rng.choice(axes + ["pipe"] * 2 * stale)] *= factor
    pipe, tensor, inner = sizes["pipe"], sizes["tensor"], sizes["inner"]
    columns, is_gpt = sizes["data"] * pipe, has.kind == "gpt"
    keys = {"pipe": pipe, "tensor": tensor, "context" if is_gpt else "space": inner}
    if columns > 1 and rng.random() < 0.2:
        cuts = sorted(rng.sample(range(1, columns), rng.randint(1, min(3, columns - 1))))
        keys["replicas"] = tuple(b - a for a, b in pairwise([0, *cuts, columns]))
        keys["pipe"] = 1
    if is_gpt and inner > 1:
        keys["attention"] = rng.choice(("zigzag", "ring", "ulysses"))
    keys["sequence"] = is_gpt and tensor > 1 and rng.random() < 0.5
    among = sizes["data"] * inner
    if has.experts and among > 1:
        keys["experts"] = rng.choice([n for n in range(2, among + 1) if among % n == 0])
        keys["alltoall"] = rng.choice(("auto", "pairwise", "linear", "native"))
    micro_batches = rng.choice((1, 2, 4))
    if stale:
        weights = rng.choice(("stash", "vertical", "spectrain", "linear", "latest", "two_buffers"))
        keys |= {"schedule": "asynchronous", "window": rng.randint(1, 3), "weights": weights}
    else:
        keys["schedule"] = rng.choice(("gpipe", "1f1b", "zero_bubble", "interleaved", *V))
        if keys["schedule"] == "interleaved":
            keys["chunks"], micro_batches = 2, pipe * rng.randint(1, 2)
        keys["zero"] = rng.choice((0, 0, 1, 2, 3))
    keys |= {key: rng.random() < 0.2 for key in ("recompute", "checksums")}
    keys |= {"overlap": rng.random() < 0.7, "bucket_bytes": rng.choice((512, 2**20))}
    stages, chunks = len(keys.get("replicas", ())) or pipe, keys.get("chunks", 1)
    layers = {"gpt": has.layers + 2, "resnet": len(has.channels) + 2}
    most = layers.get(has.kind, len(has.channels) + len(has.hidden) + 1)
    if stages * (2 if keys["schedule"] in V else chunks) > most:
        return drawn_layout(rng, job, comm, refused, stale=stale)
    try:
        return changed(job, parallel=keys, train={"micro_batches": micro_batches})
    except ConfigError as error:
        refused[kind_of(error)] += 1
        return drawn_layout(rng, job, comm, refused, stale=stale)


def kind_of(error: ConfigError) -> str:
    """Its sentence without numbers."""
    return re.sub(r"[-(),\d]*\d[-(),\d]*", "#", str(error))


def trained(comm, config, *, first=0, keep_at=0):
    """Losses and norms of the steps after ``first``, and all weights after the last."""
    with start(comm, config) as trainer:
        if first:
            found = resume(trainer.parts)
            assert (found.step, found.refused) == (first, []), found
        curve = []
        for record in trainer.run_epoch(0):
            curve.append((record.loss, record.grad_norm))
            if len(curve) == keep_at:
                assert trainer.parts.steps_done == keep_at
                keep(trainer)
        return np.array(curve), whole(comm, trainer)


def right(config, ranks, first=0):
    """Numbers that one process finds."""
    if config.parallel.schedule == "asynchronous":
        losses, weights = simulated(config, STEPS, ranks=ranks, done=first)
        return np.array(losses)[:, None], weights
    plain = replace(config, parallel=Parallel(), train=replace(config.train, micro_batches=1))
    with Communicator(MPI.COMM_SELF) as one:
        return trained(one, plain, first=first)


def apart(found, right):
    """The largest difference: relative of losses and norms, absolute of weights."""
    assert found[1].keys() == right[1].keys()
    curves = np.abs(found[0][:, : right[0].shape[1]] / right[0] - 1).max()
    return max(curves, *(np.abs(found[1][name] - value).max() for name, value in right[1].items()))


def told(config):
    """The keys of a layout that are not as usual."""
    usual = asdict(Parallel()) | {"bucket_bytes": config.parallel.bucket_bytes}
    keys = {key: v for key, v in asdict(config.parallel).items() if v != usual[key]}
    keys["micro_batches"] = config.train.micro_batches
    return " ".join(f"{key}={value}" for key, value in keys.items()).replace(", ", ",")


def run(comm, rng, folder, say, refused):
    """One round; says what it compares before it does.  Returns the worst difference."""

    def differs(found, config, first=0):
        alone = right(config, comm.size, first) if comm.rank == 0 else None
        return apart(found, comm.bcast(alone))

    stale = rng.random() < 0.35
    job = changed(drawn_job(rng, comm.size), dir=str(folder))
    job = replace(job, optim=SGD) if stale else job
    config = drawn_layout(rng, job, comm, refused, stale=stale)
    shape = job.model
    say(f"{shape.kind} experts={shape.experts} layers={shape.layers} {job.optim.name} "
        f"batch={job.train.batch_size}: {told(config)}")  # fmt: skip
    steps = config.parallel.window if stale else rng.randint(1, STEPS - 1)
    found = trained(comm, config, keep_at=steps)
    worst = [differs(found, config)]
    say(f" {worst[0]:.1e}")
    again = trained(comm, config, first=steps)
    assert np.array_equal(again[0], found[0][steps:]), "a run that goes on has other losses"
    assert all(np.array_equal(again[1][n], v) for n, v in found[1].items()), "it has other weights"
    moved = drawn_layout(rng, job, comm, refused, stale=stale and rng.random() < 0.5)
    say(f" goes on, and in {told(moved)}")
    worst.append(differs(trained(comm, moved, first=steps), moved, steps))
    say(f" {worst[1]:.1e}")
    return max(worst)


def main() -> int:
    """Draws; 1 for a difference."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=50, help="drawn jobs (50)")
    parser.add_argument("--first", type=int, default=0, help="the first round's number (0)")
    parser.add_argument("--seed", type=int, default=1, help="of what is drawn (1)")
    options = parser.parse_args()
    bad, refused = 0, Counter()
    with Communicator(MPI.COMM_WORLD) as comm:
        for number in range(options.first, options.first + options.rounds):
            faulthandler.dump_traceback_later(600, exit=True)
            folder = Path(comm.bcast(tempfile.mkdtemp() if comm.rank == 0 else None))
            said = [f"{comm.size} ranks, round {number}: "]
            try:
                drawn = Random(f"{options.seed} {number} {comm.size}")
                worst = run(comm, drawn, folder, said.append, refused)
                bad += worst > MOST
                said.append("" if worst <= MOST else " DIFFERENCE")
            except ConfigError as error:
                said.append(f" refused: {error}")
                refused[kind_of(error)] += 1
            except BaseException:
                print("".join(said), file=sys.stderr, flush=True)
                raise
            if comm.rank == 0:
                print("".join(said), flush=True)
                shutil.rmtree(folder)
        if comm.rank == 0:
            for sentence, times in refused.most_common():
                print(f"{times} times refused: {sentence}")
    faulthandler.cancel_dump_traceback_later()
    return int(bad > 0)


if __name__ == "__main__" and main():
    sys.exit(1)
