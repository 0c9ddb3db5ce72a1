"""``mpitrain rehearse``: the pipeline schedules with stages that sleep."""

import argparse

from collectives import Communicator
from mpitrain.config import ConfigError
from mpitrain.pipeline.rehearse import rehearse as run_schedule
from mpitrain.pipeline.schedules import SCHEDULES
from mpitrain.pipeline.simulate import PassTimes


def rehearse(comm: Communicator, options: argparse.Namespace) -> int:
    """Run the pipeline schedules with stages that sleep."""
    seconds = options.milliseconds / 1e3
    if comm.rank == 0:
        print(f"{comm.size} stages, {options.micro_batches} micro-batches")
        print(
            f"{'':<14} {'formula':>8} {'simulated':>9} {'measured':>8} {'held':>5} {'promised':>8}"
        )
    for name in SCHEDULES:
        chunks = options.chunks if name == "interleaved" else 1
        try:
            found = run_schedule(
                comm, name, options.micro_batches, PassTimes(seconds, seconds, seconds), chunks
            )
        except ValueError as error:
            raise ConfigError(str(error)) from error
        if comm.rank == 0:
            print(
                f"{name:<14} {found.formula:8.1%} {found.simulated:9.1%} {found.measured:8.1%} "
                f"{found.held:5d} {found.promised:8d}"
            )
    return 0
