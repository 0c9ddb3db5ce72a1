"""Layouts of the trainer for every number of ranks, and short runs on them."""

from functools import cache
from itertools import islice
from pathlib import Path

import numpy as np
from mpi4py import MPI
from msgspec import json

from mpitrain.checkpoint.saving import checkpoints, resume, save
from mpitrain.checkpoint.writer import Writer
from mpitrain.config import Config, Data, Model, Optim, Parallel, Run, Train, configured
from mpitrain.metrics.records import Step
from mpitrain.ranks.stop import StopFlag
from mpitrain.start import start
from tests.cases import mostly_slow

RANKS = MPI.COMM_WORLD.size
TEXT = Path(__file__).parents[3] / "jobs/examples/license.txt"

MODELS = {
    "gpt": (
        Data(name="text", path=str(TEXT), context=8, test_fraction=0.03),
        # Layouts of four ranks and more cut it into eight parts, of fewer ranks into six at most.
        Model(kind="gpt", layers=4 if RANKS < 4 else 6, heads=4, width=16),
        Optim(name="adamw", lr=1e-3, reference_batch=0, weight_decay=0.1, clip_norm=1.0),
    ),
    "convnet": (
        Data("digits"),
        Model(kind="convnet", channels=(4, 8), hidden=(16, 12)),
        Optim(lr=0.05, weight_decay=1e-4),
    ),
    "resnet": (
        Data("digits"),
        Model(kind="resnet", channels=(4, 8)),
        Optim(name="lamb", lr=1e-3, reference_batch=0, weight_decay=0.01),
    ),
    "mlp": (Data("digits"), Model(kind="mlp", hidden=(32, 16)), Optim(lr=0.05, nesterov=True)),
    "recommender": (
        Data(name="clicks", samples=600, tables=5, rows=30),
        Model(kind="recommender", width=4, hidden=(8,)),
        Optim(name="adam", lr=1e-2, reference_batch=0),
    ),
}


def job(model, dtype="float64", batch_size=24, micro_batches=4, **parallel):
    data, shape, optim = MODELS[model]
    return Config(
        run=Run(seed=3, dtype=dtype),
        data=data,
        model=shape,
        optim=optim,
        train=Train(epochs=2, batch_size=batch_size, micro_batches=micro_batches),
        parallel=Parallel(bucket_bytes=2048, **parallel),
    )


def mlp(dtype="float32", **parallel):
    """A job that has the same batches in one piece on any number of ranks."""
    return job("mlp", dtype, batch_size=100, micro_batches=1, **parallel)


def text_job(path, **run):
    """A job of a text that each rank may have under another name."""
    return changed(job("gpt"), data={"path": str(path), "units": "bytes"}, run=run)


def changed(config, **keys):
    """The job with other values of keys that one table has, or of tables."""
    return configured(config, keys)


def in_folder(config, folder, **keys):
    return changed(config, dir=folder, **keys)


class StopsAfter(StopFlag):
    """Asks to stop after a step, on one rank or on all; ``trainer`` is set later."""

    def __init__(self, step, asks=True):
        super().__init__()
        self.step, self.asks, self.trainer = step, asks, None

    def raised(self):
        if self.asks and self.trainer.parts.steps_done + 1 == self.step:
            self.reason = "a test"
        return bool(self.reason)


def keep(trainer, most=9):
    """Writes a checkpoint of the run as it is, beside ``most - 1`` others."""
    folder = checkpoints(trainer.parts.config)
    save(trainer.parts, Writer(trainer.parts.comm, folder, keep=most, background=False))


def equal(found, expected):
    """Arrays by name, bit by bit."""
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)


def close(found, expected, **tolerance):
    """Arrays by name, nearly."""
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, **tolerance, err_msg=name)


def curve(comm, config, steps=20):
    """(loss and gradient norm of each step, the parameters after the last by name)."""
    with start(comm, config) as trainer:
        records = list(islice(trainer.run_epoch(0), steps))
        assert all(isinstance(record, Step) for record in records)
        found = np.array([(record.loss, record.grad_norm) for record in records])
        return found, whole(comm, trainer)


def whole(comm, trainer):
    """The model's parameters on every rank, put together from all ranks' pieces."""
    parts = []
    for piece in trainer.parts.store.pieces:
        for tensor in trainer.parts.arena.tensors:
            low, high = max(tensor.start, piece.start), min(tensor.stop, piece.stop)
            if low < high:
                values = piece.parameters[low - piece.start : high - piece.start].copy()
                parts.append((tensor, low - tensor.start, values))
    found = {}
    for tensor, offset, values in [part for own in comm.allgather(parts) for part in own]:
        into = found.setdefault(tensor.name, np.full(tensor.whole, np.nan, values.dtype))
        index = tensor.part(np.arange(into.size).reshape(into.shape)).ravel()
        into.flat[index[offset : offset + values.size]] = values
    return found


def to_the_end(trainer):
    """The records of all the job's steps."""
    records = []
    while trainer.parts.steps_done < trainer.parts.total_steps:
        epoch = trainer.parts.steps_done // trainer.parts.sampler.steps_per_epoch
        records += trainer.run_epoch(epoch)
    return records


def assert_goes_on(comm, config, kept=lambda trainer: {}):
    """A run that stops after 2 of 4 steps and goes on has the bits of one that does not stop.

    ``kept``: what the checkpoint must hold besides, by name; of some rank it is not 0.
    """
    expected_curve, expected = curve(comm, config, steps=4)
    with start(comm, config) as trainer:
        list(islice(trainer.run_epoch(0), 2))
        writer = Writer(comm, checkpoints(config), keep=2)
        save(trainer.parts, writer)
        before = kept(trainer)
        list(islice(trainer.run_epoch(0), 1))  # after the snapshot, while it is being written
        writer.finish()
    with start(comm, config) as trainer:
        resumed = resume(trainer.parts)
        assert (resumed.step, resumed.refused) == (2, [])
        equal(kept(trainer), before)
        assert any(comm.allgather(any(values.any() for values in before.values()))) or not before
        records = list(islice(trainer.run_epoch(0), 2))
        np.testing.assert_array_equal([(r.loss, r.grad_norm) for r in records], expected_curve[2:])
        equal(whole(comm, trainer), expected)


def alone(config, steps=20):
    """Curve of one process, without micro-batches or any layout; trained once for all tests."""
    kept = {name: getattr(config, name) for name in ("run", "data", "model", "loss", "optim")}
    train = Train(epochs=config.train.epochs, batch_size=config.train.batch_size)
    return _trained_alone(json.encode(Config(**kept, train=train)), steps)


@cache
def _trained_alone(text, steps):
    return curve(MPI.COMM_SELF, json.decode(text, type=Config), steps)


ZERO_BUBBLE = dict(schedule="zero_bubble")
INTERLEAVED = dict(schedule="interleaved", chunks=2)
ZB_V = dict(schedule="zb_v", chunks=2)

#: Layouts that any number of ranks n has.
ANY = {
    "data": lambda n: {},
    "pipe, gpipe": lambda n: dict(pipe=n, schedule="gpipe"),
    "pipe, 1f1b": lambda n: dict(pipe=n),
    "pipe, zero bubble": lambda n: dict(pipe=n, **ZERO_BUBBLE),
    "zero 1": lambda n: dict(zero=1),
    "zero 2": lambda n: dict(zero=2),
    "zero 3": lambda n: dict(zero=3),
    "recomputed": lambda n: dict(recompute=True),
}
#: Layouts of some numbers of ranks; tests/drawn_layouts.py draws others.
SOME = {
    2: {
        "interleaved": dict(pipe=2, **INTERLEAVED),
        "v, zero bubble": dict(pipe=2, **ZB_V),
        "v, dualpipe": dict(pipe=2, schedule="dualpipe_v", chunks=2, recompute=True),
        "v, half": dict(pipe=2, schedule="v_half", chunks=2),
        "tensor": dict(tensor=2),
        "sequence": dict(tensor=2, sequence=True),
        "sequence, zero 3": dict(tensor=2, sequence=True, zero=3),
        "context": dict(context=2),
        "context, ulysses, zero 3": dict(context=2, attention="ulysses", zero=3),
        "context, recomputed": dict(context=2, recompute=True),
    },
    3: {
        "v, zero bubble": dict(pipe=3, **ZB_V),
        "v, least": dict(pipe=3, schedule="v_min", chunks=2),
        "unequal 2-1": dict(replicas=(2, 1)),
        "unequal 1-2": dict(replicas=(1, 2)),
        "unequal zero 2": dict(replicas=(1, 2), zero=2),
        "unequal zero 3": dict(replicas=(1, 2), zero=3),
        # 8 positions in 6 pieces, and 4 heads on 3 ranks.
        "context, zero 1": dict(context=3, zero=1),
        "context, ring": dict(context=3, attention="ring", recompute=True),
        "context, ulysses": dict(context=3, attention="ulysses"),
    },
    4: {
        "tensor": dict(tensor=4),
        "data x pipe": dict(pipe=2),
        "data x pipe, interleaved, zero 3": dict(pipe=2, zero=3, **INTERLEAVED),
        "v x sequence": dict(pipe=2, tensor=2, sequence=True, **ZB_V),
        "data x tensor, zero 3": dict(tensor=2, zero=3),
        "pipe x tensor": dict(pipe=2, tensor=2),
        "context x pipe, zero 3": dict(context=2, pipe=2, zero=3, **INTERLEAVED),
        "unequal 1-2-1": dict(replicas=(1, 2, 1), **ZERO_BUBBLE),
        "partition 1-6-1": dict(replicas=(1, 2, 1), partition=(1, 6, 1)),
    },
}


def layouts(model, ranks):
    """The layouts that a model has on so many ranks, by name."""
    found = {name: make(ranks) for name, make in ANY.items()} | SOME.get(ranks, {})
    has_pipe = lambda p: p.get("pipe", 1) * p.get("chunks", 1)  # noqa: E731
    gpt = 2 + MODELS["gpt"][1].layers
    layers = {"gpt": gpt, "convnet": 5, "resnet": 4, "mlp": 3, "recommender": 3}[model]
    return {
        name: parallel
        for name, parallel in found.items()
        if has_pipe(parallel) <= layers
        and (model != "recommender" or "tensor" not in parallel)
        and (model == "gpt" or not {"sequence", "partition", "context"} & parallel.keys())
        and (model != "recommender" or not parallel.keys() - {"recompute"})
        and not (model in ("gpt", "resnet") and parallel.get("tensor", 1) in (3, 5))
        and not (model == "mlp" and len(parallel.get("replicas", ())) > layers)
    }


#: Layouts that have every kind of parallelism between them.
_FEW = {
    2: ("interleaved", "sequence, zero 3"),
    3: ("v, zero bubble", "zero 3"),
    4: ("data x pipe, interleaved, zero 3", "data x tensor, zero 3", "unequal 1-2-1",
        "context x pipe, zero 3"),
}  # fmt: skip


def few(model, ranks, quick=None):
    """The names of all layouts, most of them marked slow: for what depends little on the layout."""
    quick = quick or _FEW.get(ranks, ("data",))
    return mostly_slow(layouts(model, ranks), quick)
