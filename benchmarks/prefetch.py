"""Steps of ZeRO-3 with and without ``parallel.prefetch``, beside FSDP2 over Gloo.

    mpirun -n 2 python -m benchmarks.prefetch
    COLLECTIVES_LINK=cluster mpirun -n 2 python -m benchmarks.prefetch     # ours alone, over a link

The ways take turns; times are medians of the slowest rank, and the losses of ours must be equal.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, count
from statistics import median

import torch
import torch.distributed as dist
from mpi4py import MPI

import mpitrain
from benchmarks.program import run
from benchmarks.torch_backend import in_turns
from benchmarks.torch_steps import fsdp2, model, step
from collectives.torch.register import register
from mpitrain.metrics.records import Step


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures; rank 0 prints a table in Markdown."""
    parser = argparse.ArgumentParser(prog="benchmarks.prefetch", description=__doc__)
    parser.add_argument("--width", type=int, default=1024, help="inputs of each layer (1024)")
    parser.add_argument("--batch", type=int, default=256, help="samples of a rank (256)")
    parser.add_argument("--repeats", type=int, default=30, help="steps of each way (30)")
    return run(parser, arguments, _measured)


def _measured(options: argparse.Namespace) -> int:
    comm, width, batch = MPI.COMM_WORLD, options.width, options.batch
    torch.set_num_threads(1)
    losses: dict[str, list[float]] = {}
    ways: dict[str, Callable[[], object]] = {}
    with tempfile.TemporaryDirectory() as folder:
        layouts: dict[str, dict[str, object]] = {
            "whole": {},
            "ZeRO-3": {"zero": 3, "prefetch": False},
            "ZeRO-3, prefetched": {"zero": 3},
        }
        for way, keys in layouts.items():
            steps = _ours(width, batch * comm.size, f"{folder}/{way}", keys)
            ways[way] = partial(_take, steps, losses.setdefault(way, []))
        if "COLLECTIVES_LINK" not in os.environ:
            register()
            dist.init_process_group("collectives", "mpi://")
            whole = fsdp2(model(width), dist.new_group(backend="gloo"))
            ways["FSDP2 over Gloo"] = step(whole, batch, width, comm.rank, [])
        in_turns(comm, ways, 3)
        times = in_turns(comm, ways, options.repeats)
    if losses["ZeRO-3"] != losses["ZeRO-3, prefetched"]:
        raise SystemExit(f"prefetching has changed the losses: {losses}")
    if comm.rank == 0:
        print("| way | ms a step | least |\n| --- | ---: | ---: |")
        for way, seconds in times.items():
            print(f"| {way} | {1e3 * median(seconds):.1f} | {1e3 * min(seconds):.1f} |")
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


def _take(steps: Iterator[Step], losses: list[float]) -> None:
    losses.append(next(steps).loss)


def _ours(width: int, batch: int, folder: str, parallel: dict[str, object]) -> Iterator[Step]:
    """The steps of the model of ``torch_steps`` on samples like those there."""
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(batch, width, generator=draw), torch.randn(batch, 8, generator=draw)
    trainer = mpitrain.Trainer(
        model=lambda: model(width), train_data=torch.utils.data.TensorDataset(x, y),
        loss=torch.nn.functional.mse_loss, batch_size=batch, epochs=10_000, parallel=parallel,
        optim={"lr": 0.01, "momentum": 0.0, "reference_batch": 0}, shadow=0,
        dir=MPI.COMM_WORLD.bcast(folder),
    )  # fmt: skip
    records = chain.from_iterable(map(trainer.run_epoch, count()))
    return (record for record in records if isinstance(record, Step))


if __name__ == "__main__":
    sys.exit(main())
