"""Stage 6: layouts of the trainer, whose losses are the CPU's; checkpoints that change devices."""

from functools import partial
from itertools import islice

from mpi4py import MPI

from tests.gpu.check import Check
from tests.gpu.jobs import expect_near, moved, small, trained, trainer_on
from tests.mpi.mpitrain.layouts import changed, job

PIPE = {"pipe": 2}
#: Layouts, by the numbers of ranks that have them.
LAYOUTS = {
    "data": ({}, (1, 2, 4)),
    "zero 1": ({"zero": 1}, (2, 4)),
    "zero 2": ({"zero": 2}, (2,)),
    "zero 3": ({"zero": 3}, (2,)),
    "recomputed": ({"recompute": True}, (1,)),
    "pipe, 1f1b": (PIPE, (2, 4)),
    "pipe, zero bubble": (PIPE | {"schedule": "zero_bubble"}, (2,)),
    "pipe, interleaved": (PIPE | {"schedule": "interleaved", "chunks": 2}, (2,)),
    "tensor": ({"tensor": 2}, (2, 4)),
    "sequence": ({"tensor": 2, "sequence": True}, (2,)),
    "pipe x tensor": (PIPE | {"tensor": 2}, (4,)),
}


def compare(config, rtol):
    right, found = (trained(device, config) for device in ("cpu", "cuda"))
    expect_near(found[0], right[0], rtol)
    apart = max(abs(a[0] - b[0]) / b[0] for a, b in zip(found[0], right[0], strict=True))
    return f"3 steps; losses within {apart:.1e} of the CPU's"


def asynchronous():
    config = job("mlp", "float32", schedule="asynchronous", window=3, pipe=MPI.COMM_WORLD.size)
    return compare(changed(config, optim={"nesterov": False}), 1e-3)


def elsewhere():
    right, found = moved(small(zero=1))
    expect_near(found, right, 1e-3)
    return "cpu, cuda, cpu: the losses go on"


def no_waits():
    """Two steps with synchronisation forbidden, but for the one that reads loss and norm."""
    import cupyx

    with trainer_on("cuda", small()) as trainer:
        read = trainer.parts.device.read

        def once(scalars):
            with cupyx.allow_synchronize(True):
                return read(scalars)

        trainer.parts.device.read = once
        with cupyx.allow_synchronize(False):
            assert len(list(islice(trainer.run_epoch(0), 2))) == 2
    return "forward, backward and update without a wait"


CHECKS = [
    *(
        Check(6, f"trainer.{name}", partial(compare, small(**parallel), 1e-3), ranks, 120.0)
        for name, (parallel, ranks) in LAYOUTS.items()
    ),
    *(
        Check(6, f"trainer.{kind}", partial(compare, changed(small(), run={"compute": kind}), 5e-2))
        for kind in ("float16", "bfloat16")
    ),
    Check(6, "trainer.asynchronous", asynchronous, (1, 2)),
    Check(6, "trainer.resnet", partial(compare, job("resnet", "float32"), 1e-2)),
    Check(6, "trainer.recommender", partial(compare, job("recommender", "float32"), 1e-2), (1, 2)),
    Check(6, "trainer.checkpoints", elsewhere, (1, 2)),
    Check(6, "trainer.no waits", no_waits),
]
