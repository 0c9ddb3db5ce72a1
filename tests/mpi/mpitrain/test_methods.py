"""Every pair of methods that the table allows trains: as one process, where that is promised."""

import math

import msgspec
import numpy as np
import pytest
from mpi4py import MPI

import mpitrain
from mpitrain.config import Config, expect_read
from mpitrain.config.conflicts import CHOSEN, combined, refusals, tables_of, uses
from mpitrain.config.own import brought
from mpitrain.config.validation import faults
from mpitrain.metrics.records import Step

pytestmark = pytest.mark.at_most(4)

METHODS = {method.name: method for method in CHOSEN if method.name != "cuda"}
#: Methods that change a step's numbers by no more than rounding.
EXACT = {
    name
    for name, method in METHODS.items()
    if next(iter(method.sets)).partition(".")[0] not in ("compress", "sync", "server", "federated")
} - {"asynchronous", "prediction", "latest", "float16", "bfloat16"}
#: A torch module needs the weights of its forward pass and whole images, and own layers would not.
TORCH_ALONE = [{name, "own-model"} for name in ("prediction", "latest", "space")]
#: Keys that an optimiser or a model of the program does not read.
UNREAD = [
    {"weight-decay", "own-optimizer"}, {"experts", "own-model"}, {"expert-parallel", "own-model"},
]  # fmt: skip
#: Methods whose models read no vectors.
OTHER_DATA = {
    "sequence", "context", "space", "convolutions", "gpt", "tied", "recommender", "hogwild",
    "experts", "expert-parallel",
}  # fmt: skip
QUICK = [
    ("pipe", "zero-3"), ("tensor", "zero-1"), ("asynchronous", "pipe"), ("vote", "gpt"),
    ("diloco", "clip-norm"), ("server", "adam"),
]  # fmt: skip
#: Losses of runs on one process, by their keys.
ONE_PROCESS = {}
OWN = """
import torch

class Data:
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return torch.linspace(-1, 1, 64).double() * ((index % 16) / 8 + 0.1), index % 10

def data():
    return Data(96), Data(16)

def model():
    shared = torch.nn.Sequential(torch.nn.Linear(64, 8), torch.nn.Tanh(), torch.nn.Linear(8, 6))
    return torch.nn.Sequential(torch.nn.Flatten(), shared, torch.nn.Tanh(),
                               torch.nn.Linear(6, 10)).double()

def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05)
"""


@pytest.fixture(scope="module")
def folder(comm, tmp_path_factory):
    path = comm.bcast(tmp_path_factory.mktemp("methods") if comm.rank == 0 else None)
    if comm.rank == 0:
        (path / "methods.py").write_text(OWN)
        (path / "text.txt").write_text("".join(chr(97 + i * i % 13) for i in range(2000)))
    comm.Barrier()
    return path


def small(methods, folder):
    """The keys of a short job that uses these methods."""
    keys = combined(methods)
    for key, value in keys.items():
        if key in ("data.path", "parallel.offload") or key.startswith("own."):
            keys[key] = f"{folder}/{value}"
    more = {
        "mlp": {"model.hidden": [8, 6]},
        "convnet": {"model.channels": [2, 3], "model.hidden": [8]},
        "gpt": {"model.layers": 2, "model.heads": 2, "model.width": 8, "data.context": 8},
        "recommender": {
            "data.samples": 200, "data.tables": 3, "data.rows": 20, "model.width": 4,
            "model.hidden": [8, 6],
        },
    }[keys["model.kind"]]  # fmt: skip
    if "own.model" in keys:
        del keys["model.kind"]
        more = {}
        if "parallel.tensor" in keys:
            more["own.splits"] = {"1.0": "columns", "1.2": "rows"}
    if "own.data" in keys:
        more |= {"own.classes": 10}
    if "own.optimizer" in keys or "optim.name" in keys:
        keys.pop("optim.momentum")
    if keys.get("compress.codec", "none") != "none" and "server.ranks" not in keys:
        more |= {"compress.least": 8}
    if keys.get("sync.kind") in ("local", "delayed"):
        more |= {"sync.period": 2}
    if keys.get("parallel.schedule") == "asynchronous":
        more |= {"train.micro_batches": 2, "parallel.window": 2}
    more |= {"run.dtype": "float64", "parallel.bucket_bytes": 512, "train.batch_size": 24}
    if "federated.clients" in keys:
        more |= {"train.batch_size": 96, "train.epochs": 1, "federated.rounds": 2}
    else:
        more |= {"train.steps": 3}
    return more | keys


def ranks_for(keys, size):
    """As many ranks as the layout can have; 0 if it needs more."""
    each = keys.get("parallel.tensor", 1) * keys.get("parallel.context", 1)
    each *= keys.get("parallel.space", 1)
    if replicas := keys.get("parallel.replicas"):
        return sum(replicas) * each if sum(replicas) * each <= size else 0
    stage = keys.get("parallel.pipe", 1) * each * keys.get("parallel.experts", 1)
    return size // stage * stage


def losses(comm, keys):
    job = msgspec.convert(msgspec.to_builtins(tables_of(keys)), Config)
    expect_read(job)
    with mpitrain.Trainer(comm, job, **brought(job.own)) as trainer:
        found, epoch = [], 0
        while trainer.parts.steps_done < trainer.parts.total_steps:
            records = trainer.run_epoch(epoch)
            found += [record.loss for record in records if isinstance(record, Step)]
            epoch += 1
        return found


def check(comm, folder, pair):
    """Trains a pair; nothing if the table refuses it, or if it needs more ranks."""
    methods = [METHODS[name] for name in pair]
    if {*pair} in [*TORCH_ALONE, *UNREAD] or ({"own-data"} & {*pair} and OTHER_DATA & {*pair}):
        return
    try:
        keys = small(methods, folder)
    except ValueError:  # they set one key to different values
        return
    job = tables_of(keys)
    if not all(uses(job, method) for method in methods) or [*refusals(job), *faults(job)]:
        return
    if (ranks := ranks_for(keys, comm.size)) <= keys.get("server.ranks", 0):
        return
    own = comm.Split(0 if comm.rank < ranks else 1)
    try:
        found = losses(own, keys) if comm.rank < ranks else []
        if comm.rank < ranks:
            assert len(found) == keys.get("train.steps", 2), pair
            assert all(map(math.isfinite, found)), pair
        if EXACT.issuperset(pair):
            alone = {key: value for key, value in keys.items() if "parallel." not in key}
            expected = ONE_PROCESS.get(str(alone)) or losses(MPI.COMM_SELF, alone)
            ONE_PROCESS[str(alone)] = expected
            if comm.rank < ranks:
                np.testing.assert_allclose(found, expected, rtol=1e-9, atol=0, err_msg=str(pair))
    finally:
        own.Free()


@pytest.mark.parametrize("pair", QUICK, ids="+".join)
@pytest.mark.quick_on(2, 4)
def test_a_pair_trains(comm, folder, pair):
    check(comm, folder, pair)


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_a_method_trains_alone_and_with_each_that_the_table_allows(comm, folder, name):
    names = [*METHODS]
    for other in names[names.index(name) :]:
        check(comm, folder, dict.fromkeys((name, other)))
