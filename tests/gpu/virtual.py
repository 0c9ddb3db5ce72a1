"""How much of the communication of a step is hidden, in virtual time: no GPU is needed.

    python -m tests.gpu.virtual

The trainer takes real steps of a GPT on the stand-in for CuPy, which computes no numbers but counts
the time that each kernel, copy and message would take (tests/gpu/timeline.py has the rates).  One
rank of several is run: the others are taken to do the same at the same time.
"""

import argparse
import os
import random
import string
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from collectives import Communicator
from collectives.algorithms import build as schedule_of
from collectives.execution.messages import Operands, bind
from collectives.execution.plan import Binding
from collectives.execution.tags import Tags
from collectives.execution.transport.device import StagedTransport
from mpitrain.config import Config, Data, Model, Optim, Run, Train
from mpitrain.parallel.summation import Summation
from mpitrain.start import start
from mpitrain.training import assemble, build
from tests.gpu import virtual_card
from tests.gpu.timeline import Rates, Timeline


@dataclass(frozen=True)
class Mirrored(Summation):
    """Sums over ``size`` ranks of which there is one."""

    timeline: Timeline
    size: int
    memory: virtual_card.VirtualMemory
    staged: bool
    lanes: count
    acts_alone = True

    def check(self, arena):
        """It can."""

    def bind(self, summand):
        mirror = virtual_card.Mirror(self.timeline, self.size)
        transport = StagedTransport(mirror, self.memory) if self.staged else mirror
        with self.memory.working():
            return bind(
                schedule_of("allreduce", "ring", self.size),
                transport,
                Operands(None, summand.total),
                np.add,
                Binding(
                    progress=summand.comm._engine.progress,
                    tags=Tags(next(self.lanes)),
                    memory=self.memory,
                ),
            )


def job(
    folder: Path, layers: int, width: int, context: int, batch: int, samples: int = 40
) -> Config:
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


@contextmanager
def patched():
    from pytest import MonkeyPatch

    with MonkeyPatch.context() as patch:
        yield patch


def steps(
    config: Config, rates: Rates, size: int, road: str, *, blocking: bool = False
) -> tuple[float, float]:
    """Seconds of a step whose sums come behind the backward pass, and of one where they overlap.

    Args:
        size: ranks; of one alone there are no sums.
        blocking: each message waits for all that was queued before.
    """
    timeline = Timeline(rates)
    with patched() as patch, np.errstate(all="ignore"):
        virtual_card.install(patch, timeline)
        kind = virtual_card.BlockingMemory if blocking else virtual_card.VirtualMemory
        how = Mirrored(timeline, size, kind(0), road == "staged", count())
        if size > 1:
            patch.setattr(build, "summation", lambda config, replica: how)
        # Numbers do not matter, and nobody else is to be let in while virtual time goes by.
        patch.setattr(assemble, "initial", lambda parts: np.zeros(parts.arena.size, "f4"))
        patch.setattr(os, "sched_yield", lambda: None)
        with Communicator(MPI.COMM_SELF, device="staged") as comm, start(comm, config) as trainer:
            found = []
            running = trainer.run_epoch(0)
            next(running)
            for overlap in (False, True):
                trainer.parts.store.overlaps = overlap
                begin = timeline.now
                next(running)
                found.append(timeline.now - begin)
            running.close()
    return found[0], found[1]


class Row(NamedTuple):
    """A way of doing it on some devices.

    Attributes:
        seconds: of a step.
        hidden: part of the time of the sums alone by which the step is not longer than without.
    """

    devices: int
    road: str
    way: str
    seconds: float
    sums: float
    hidden: float


def rows(config: Config, rates: Rates, sizes, roads) -> list[Row]:
    """For each road and number of devices: before gates, sums behind the backward pass, today."""
    found = []
    alone, _ = steps(config, rates, 1, "direct")
    for road in roads:
        for size in sizes:
            behind, today = steps(config, rates, size, road)
            _, before = steps(config, rates, size, road, blocking=True)
            ways = {
                "each message waits (before)": before,
                "sums behind the backward pass": behind,
                "gates (today)": today,
            }
            for way, seconds in ways.items():
                hidden = 1 - (seconds - alone) / (behind - alone)
                found.append(Row(size, road, way, seconds, behind - alone, hidden))
    return found


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.virtual", description=__doc__)
    parser.add_argument("--devices", default="2,8", help="numbers of devices")
    parser.add_argument("--roads", default="direct,staged")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=8, help="samples of a step on each device")
    parser.add_argument("--link", type=float, default=Rates().link / 1e9, help="GB/s of messages")
    options = parser.parse_args(argv)
    rates = Rates(link=options.link * 1e9)
    with TemporaryDirectory() as folder:
        shape = options.layers, options.width, options.context, options.batch
        config = job(Path(folder), *shape)
        sizes = [int(text) for text in options.devices.split(",")]
        found = rows(config, rates, sizes, options.roads.split(","))
    print(f"{rates}\n")
    print("| devices | road | how | a step | the sums alone | hidden |")
    print("| ---: | --- | --- | ---: | ---: | ---: |")
    for row in found:
        print(
            f"| {row.devices} | {row.road} | {row.way} | {1e3 * row.seconds:.1f} ms | "
            f"{1e3 * row.sums:.1f} ms | {100 * row.hidden:.0f} % |"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
