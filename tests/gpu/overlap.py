"""Stage 7: time of a step, and how much of the sums of gradients is hidden behind its computation.

Ranks that share a GPU take turns on it, and what they send one another crosses no link: the numbers
are of a cluster's only where each rank has a GPU.
"""

import random
import string
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter

from mpi4py import MPI
from msgspec.structs import replace

from collectives import Communicator
from mpitrain.config import Config, Data, Model, Optim, Run, Train
from mpitrain.start import start
from tests.gpu.check import Check
from tests.gpu.roads import device

WARM_UP = 3


def job(folder: Path, layers: int, width: int, context: int, batch: int, samples: int) -> Config:
    """A GPT whose products are of 16 bits, with a text of some more than these samples."""
    text = folder / "text.txt"
    letters = string.ascii_letters + string.punctuation
    text.write_text("".join(random.Random(0).choices(letters, k=samples * context)))
    return Config(
        run=Run(dtype="float32", compute="bfloat16", device="cuda"),
        data=Data(name="text", path=str(text), context=context),
        model=Model(kind="gpt", layers=layers, heads=width // 64, width=width),
        optim=Optim(name="adamw", lr=1e-3, reference_batch=0, weight_decay=0.1, clip_norm=1.0),
        train=Train(epochs=1, batch_size=batch, micro_batches=1),
    )


def seconds_of(comm, config, overlap, steps):
    """Median seconds of a step, and of its wait for the GPU: the longest of all ranks'."""
    lasted, waited = [], [0.0]
    with start(comm, config) as trainer:
        read = trainer.parts.device.read

        def timed(scalars):
            begin = perf_counter()
            found = read(scalars)
            waited[-1] += perf_counter() - begin
            return found

        trainer.parts.device.read = timed
        trainer.parts.store.starts_early = overlap
        running = trainer.run_epoch(0)
        for _ in range(WARM_UP + steps):
            begin = perf_counter()
            next(running)
            lasted.append(perf_counter() - begin)
            waited.append(0.0)
        running.close()
    own = median(lasted[WARM_UP:]), median(waited[WARM_UP:-1])
    return [MPI.COMM_WORLD.allreduce(one, MPI.MAX) for one in own]


def hidden(road):
    """A GPT's step with sums behind the backward pass, with overlap, and without sums."""
    import cupy

    is_dry = hasattr(cupy, "machine")
    layers, width, context, batch = (2, 64, 16, 2) if is_dry else (12, 768, 1024, 4)
    steps = 2 if is_dry else 20
    world = MPI.COMM_WORLD
    with TemporaryDirectory() as folder:
        most = 2 * (WARM_UP + steps) * batch * world.size  # a part of them is tested on
        config = job(Path(folder), layers, width, context, batch, most)
        train = replace(config.train, batch_size=batch * world.size)
        together = replace(config, train=train)
        with Communicator(MPI.COMM_SELF, device="staged") as comm:
            alone, waited = seconds_of(comm, config, False, steps)
        with Communicator(world, device=device(road)) as comm:
            behind, _ = seconds_of(comm, together, False, steps)
            today, _ = seconds_of(comm, together, True, steps)
    if is_dry:
        return "steps alone, with sums behind and with overlap"
    told = f"alone {1e3 * alone:.1f} ms, the host's part {1e3 * (alone - waited):.1f} ms"
    if world.size == 1:
        return told
    told += f"; sums behind {1e3 * behind:.1f} ms, with overlap {1e3 * today:.1f} ms"
    if behind <= alone:
        return f"{told}: sums take no time that shows"
    return f"{told}: {100 * (1 - (today - alone) / (behind - alone)):.0f} % hidden"


CHECKS = [
    Check(7, "overlap.host", partial(hidden, "staged"), (1,), 120.0),
    *(
        Check(7, f"overlap.gpt, {road}", partial(hidden, road), (2,), 200.0)
        for road in ("staged", "direct")
    ),
]
