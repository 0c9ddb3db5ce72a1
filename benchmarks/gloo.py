"""Gloo's collectives, by PyTorch, in the form of our benchmark's files: one more row to compare.

    python -m benchmarks.gloo allreduce -n 2 -J gloo.json

It needs PyTorch and no MPI.  The buffers are the same in every call, as in ours with
``--buffers cached``.
"""

import argparse
import json
import os
import platform
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any

from collectives import __version__
from collectives.bench.inputs import sizes
from collectives.commands.arguments import size
from collectives.errors import install

_COLLECTIVES = ("allreduce", "allgather", "alltoall", "broadcast", "reduce_scatter")
#: As in ours: a repeat takes about so long.
_BUDGET_S = 0.02
_MOST_ITERS = 2000


def main() -> int:
    """Measures and writes the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("collective", choices=_COLLECTIVES)
    add("-n", "--ranks", type=int, default=2)
    add("-b", "--minbytes", type=size, default=8)
    add("-e", "--maxbytes", type=size, default=1 << 20)
    add("-f", "--stepfactor", type=int, default=8)
    add("--repeats", type=int, default=7)
    add("-J", "--output_file", type=Path, required=True)
    options = parser.parse_args()
    try:
        from torch import multiprocessing
    except ImportError:
        cure = install("torch", "gloo")
        print(f"error: Gloo is measured by PyTorch: {cure}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        arguments = (options, f"file://{folder}/meeting")
        multiprocessing.spawn(_rank, arguments, nprocs=options.ranks)
    return 0


def _rank(rank: int, options: argparse.Namespace, meeting: str) -> None:
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=options.ranks)
    results = []
    for nbytes in sizes(options.minbytes, options.maxbytes, options.stepfactor, None):
        results.append(_measure(options, nbytes))
    about = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "mpitrain": __version__,
        "mpi": f"Gloo (PyTorch {torch.__version__.partition('+')[0]})",
        "threads": "multiple",
        "python": platform.python_version(),
        "ranks": options.ranks,
        "nodes": 1,
        "cores": os.cpu_count(),
    }
    if rank == 0:
        content = {"version": 1, "config": {}, "environment": about, "results": results}
        options.output_file.write_text(json.dumps(content, indent=1) + "\n")
    distributed.destroy_process_group()


def _measure(options: argparse.Namespace, nbytes: int) -> dict[str, Any]:
    import torch
    from torch import distributed

    count = max(1, nbytes // 4 // options.ranks) * options.ranks
    whole, part = torch.ones(count), torch.ones(count // options.ranks)
    other = torch.ones(count)

    def call() -> None:
        match options.collective:
            case "allreduce":
                distributed.all_reduce(whole)
            case "allgather":
                distributed.all_gather_into_tensor(whole, part)
            case "alltoall":
                distributed.all_to_all_single(whole, other)
            case "broadcast":
                distributed.broadcast(whole, 0)
            case "reduce_scatter":
                distributed.reduce_scatter_tensor(part, whole)

    def timed(turns: int) -> float:
        distributed.barrier()
        begun = perf_counter()
        for _ in range(turns):
            call()
        seconds = torch.tensor([(perf_counter() - begun) / turns])
        distributed.all_reduce(seconds, distributed.ReduceOp.MAX)
        return float(seconds)

    timed(3)
    turns = max(1, min(_MOST_ITERS, int(_BUDGET_S / timed(3))))
    times = []
    for _ in range(options.repeats):
        whole.fill_(1)  # sums in place must not overflow
        times.append(1e6 * timed(turns))
    return {
        "collective": options.collective,
        "algorithm": "native",
        "bytes": nbytes,
        "memory": "numpy",
        "in_place": False,
        "times_us": times,
        "p50_us": sorted(times)[len(times) // 2],
    }


if __name__ == "__main__":
    sys.exit(main())
