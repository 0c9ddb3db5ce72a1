"""Training by every code on ranks: replicas stay equal, and the loss falls."""

from itertools import islice

import pytest
from msgspec.structs import replace

from mpitrain.compress.table import CODECS
from mpitrain.config import Compress
from mpitrain.start import start
from tests.mpi.mpitrain.layouts import mlp

pytestmark = [pytest.mark.mpi, pytest.mark.slow, pytest.mark.at_most(5)]

#: Others than the defaults, for gradients of a small model.
CODES = {
    "topk": "topk:keep=0.1",
    "dgc": "dgc:keep=0.1,momentum=0.5,clip=10",
    "randomk": "randomk:keep=0.3",
    "blocks": "blocks:keep=0.3,block=16",
    "threshold": "threshold:tau=0.01",
    "strom": "strom:tau=0.01",
    "rotate": "rotate+int4",
}


@pytest.mark.parametrize("name", CODECS)
def test_the_loss_falls_and_replicas_stay_equal(comm, name):
    config = mlp()
    optim = replace(
        config.optim, momentum=0.0, nesterov=False, lr=0.02 if name == "signum" else config.optim.lr
    )
    config = replace(config, optim=optim, compress=Compress(CODES.get(name, name), least=1))
    with start(comm, config) as trainer:
        losses = [record.loss for record in islice(trainer.run_epoch(0), 14)]
        trainer.parts.check_replicas("after some steps")
    print(f"{name}: from {losses[0]:.4g} to {losses[-1]:.4g}")
    assert sum(losses[-3:]) < 0.97 * sum(losses[:3]), losses
