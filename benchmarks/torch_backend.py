"""Calls and training steps of ``torch.distributed`` over our backend beside Gloo, in one process.

    mpirun -n 2 python -m benchmarks.torch_backend            # calls; the small ones by mpi4py too
    mpirun -n 2 python -m benchmarks.torch_backend --beside commux   # and by that backend
    mpirun -n 2 python -m benchmarks.torch_backend --small    # calls of 8 bytes, without Gloo
    mpirun -n 2 python -m benchmarks.torch_backend --steps    # steps of DDP and of FSDP2
    mpirun -n 2 python -m benchmarks.torch_backend --steps --load 2   # beside two busy processes

The ways take turns, so that what else the machine does falls on all of them.  Times are medians of
the slowest rank, and ratios those of medians and of the least times.  The table is Markdown.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI

from benchmarks import idle_group
from benchmarks.torch_steps import ddp, fsdp2, model, step
from benchmarks.words import bytes_in_words
from collectives import Communicator
from collectives.bench.report import environment
from collectives.commands.arguments import size
from collectives.torch import NAME
from collectives.torch.register import register

_SIZES = (8, 1 << 10, 1 << 16, 1 << 20, 1 << 24, 1 << 26)
#: Sizes that are called with ``async_op=True`` too.
_LATER = (8, 1 << 20)
#: Bytes up to which mpi4py's own call is a third way.
_SMALL = 1 << 16
#: A repeat takes about so many seconds, and at most so many calls.
_BUDGET_S, _MOST_CALLS = 0.02, 300
_WARMUP = 5

Ways = dict[str, Callable[[], Any]]
Times = dict[str, list[float]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures; rank 0 prints, and writes the file that ``--json`` names."""
    options = _parse(arguments)
    comm = Communicator(MPI.COMM_WORLD)
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // comm.ranks_per_node))
    register()
    dist.init_process_group(NAME, "mpi://")
    groups = {"ours": dist.group.WORLD}
    if not options.small:
        groups = {"Gloo": dist.new_group(backend="gloo"), **groups}
    if options.beside:
        import_module(options.beside).register()
        groups[options.beside] = dist.new_group(backend=options.beside)
    about = {**environment(comm), "torch": torch.__version__}
    if comm.rank == 0:
        print(
            f"torch {about['torch']}, {about['mpi']}, {comm.size} ranks on {about['nodes']} "
            f"node(s), {about['cores']} cores of {about['processor']}\n",
            flush=True,
        )
    with _loaded(options.load if comm.rank == 0 else 0):
        if options.small:
            rows = _small_calls(comm, options)
        elif options.steps:
            rows = _steps(comm, groups, options)
        else:
            rows = _calls(comm, groups, options)
    if comm.rank == 0 and options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"environment": about, "rows": rows}, indent=1) + "\n")
    dist.destroy_process_group()
    return 0


@contextmanager
def _loaded(processes: int) -> Iterator[None]:
    """Context in which other processes compute on the ranks' cores."""
    command = [sys.executable, "-S", "-c", "while True: pass"]
    started = [subprocess.Popen(command) for _ in range(processes)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def in_turns(comm: MPI.Intracomm, ways: Ways, repeats: int, calls: int = 1) -> Times:
    """Seconds of one call in each repeat, those of the slowest rank.  Collective."""
    times: Times = {way: [] for way in ways}
    for _ in range(repeats):
        for way, call in ways.items():
            comm.Barrier()
            begun = perf_counter()
            for _ in range(calls):
                call()
            times[way].append(comm.allreduce((perf_counter() - begun) / calls, MPI.MAX))
    return times


def _calls(
    comm: MPI.Intracomm, groups: dict[str, Any], options: argparse.Namespace
) -> list[dict[str, Any]]:
    rows = []
    others = ["mpi4py", *([options.beside] if options.beside else [])]
    heads = (f"{other}, us" for other in others)
    _print(comm, ["call", "bytes", "Gloo, us", "ours, us", *_RATIOS, *heads])
    native = MPI.COMM_WORLD.Dup()
    for collective in _COLLECTIVES:
        for nbytes in options.sizes:
            for later in (False, True)[: 1 + (nbytes in _LATER)]:
                ways = {way: _call(collective, nbytes, g, later) for way, g in groups.items()}
                if options.beside and not _has(ways[options.beside]):
                    del ways[options.beside]
                if nbytes <= _SMALL and not later:
                    ways["mpi4py"] = _native(collective, nbytes, native)
                slowest = max(map(max, in_turns(comm, ways, 3).values()))
                calls = max(1, min(_MOST_CALLS, int(_BUDGET_S / slowest)))
                times = in_turns(comm, ways, options.repeats, calls)
                rows.append({"call": collective, "bytes": nbytes, "async": later, "times_s": times})
                us = {way: 1e6 * median(seconds) for way, seconds in times.items()}
                name = f"{collective}, async" if later else collective
                cells = [name, bytes_in_words(nbytes), f"{us['Gloo']:.1f}", f"{us['ours']:.1f}"]
                cells += [*_ratios(times), *(f"{us[o]:.1f}" if o in us else "" for o in others)]
                _print(comm, cells)
    native.Free()
    _print_ratios(comm, rows)
    return rows


def _has(call: Callable[[], Any]) -> bool:
    """Whether a backend has this collective; the answer is every rank's."""
    try:
        call()
    except RuntimeError as error:
        if "does not support" not in str(error):
            raise
        return False
    return True


def _print_ratios(comm: MPI.Intracomm, rows: list[dict[str, Any]]) -> None:
    """The table of ``docs/measurements.md``: Gloo's median over ours, of blocking calls."""
    blocking = [row for row in rows if not row["async"]]
    ratios = {(row["call"], row["bytes"]): _ratios(row["times_s"])[0] for row in blocking}
    if comm.rank == 0:
        print()
    _print(comm, ["bytes", *(f"`{collective}`" for collective in _COLLECTIVES)])
    for nbytes in dict.fromkeys(row["bytes"] for row in blocking):
        cells = [ratios[collective, nbytes] for collective in _COLLECTIVES]
        _print(comm, [bytes_in_words(nbytes), *cells])


def _small_calls(comm: MPI.Intracomm, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Calls of 8 bytes; the threads of a group of Gloo's would run beside them.

    torch's own functions take the time of a group that does nothing, so the backend's own time is
    what is left without it and without mpi4py's call.
    """
    rows = []
    _print(comm, ["call", *(f"{way}, us" for way in _SMALL_WAYS), "own", "own, async"])
    native = MPI.COMM_WORLD.Dup()
    idle_group.register()
    idle = dist.new_group(backend=idle_group.NAME)
    for collective in (*_COLLECTIVES, "reduce", "barrier"):
        calls = (
            _call(collective, 8, dist.group.WORLD, False),
            _call(collective, 8, dist.group.WORLD, True),
            _native(collective, 8, native),
            _call(collective, 8, idle, False),
            _call(collective, 8, idle, True),
        )
        ways = dict(zip(_SMALL_WAYS, calls, strict=True))
        in_turns(comm, ways, _WARMUP, _MOST_CALLS)
        times = in_turns(comm, ways, options.repeats, _MOST_CALLS)
        rows.append({"call": collective, "bytes": 8, "times_s": times})
        us = [1e6 * median(seconds) for seconds in times.values()]
        ours, later, theirs, torchs, torchs_later = us
        us += [ours - theirs - torchs, later - theirs - torchs_later]
        _print(comm, [collective, *(f"{value:.1f}" for value in us)])
    native.Free()
    return rows


_SMALL_WAYS = ("ours", "async and wait", "mpi4py", "torch alone", "torch alone, async")
_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")


def _buffers(nbytes: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two of so many bytes, and one rank's part: zeros, so that sums in place do not overflow."""
    part = torch.zeros(max(1, nbytes // 4 // ranks))
    return torch.zeros(len(part) * ranks), torch.zeros(len(part) * ranks), part


def _call(collective: str, nbytes: int, group: Any, later: bool) -> Callable[[], Any]:
    whole, other, part = _buffers(nbytes, dist.get_world_size())
    named: dict[str, Any] = {"group": group, "async_op": later}
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    begin = {
        "all_reduce": lambda: dist.all_reduce(whole, **named),
        "all_gather": lambda: gather(whole, part, **named),
        "reduce_scatter": lambda: scatter(part, whole, **named),
        "all_to_all": lambda: dist.all_to_all_single(whole, other, **named),
        "broadcast": lambda: dist.broadcast(whole, 0, **named),
        "reduce": lambda: dist.reduce(whole, 0, **named),
        "barrier": lambda: dist.barrier(**named),
    }[collective]
    return (lambda: begin().wait()) if later else begin


def _native(collective: str, nbytes: int, comm: MPI.Intracomm) -> Callable[[], Any]:
    whole, other, part = (t.numpy() for t in _buffers(nbytes, comm.size))
    return {
        "all_reduce": lambda: comm.Allreduce(MPI.IN_PLACE, whole),
        "all_gather": lambda: comm.Allgather(part, whole),
        "reduce_scatter": lambda: comm.Reduce_scatter_block(whole, part),
        "all_to_all": lambda: comm.Alltoall(other, whole),
        "broadcast": lambda: comm.Bcast(whole),
        "reduce": lambda: comm.Reduce(whole if comm.rank else MPI.IN_PLACE, whole),
        "barrier": comm.Barrier,
    }[collective]


def _steps(
    comm: MPI.Intracomm, groups: dict[str, Any], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Steps of one model, with little to compute.

    Raises:
        RuntimeError: the ways do not train the same.
    """
    rows = []
    nbytes = sum(p.nbytes for p in model(options.width).parameters())
    if comm.rank == 0:
        print(f"{nbytes / 2**20:.0f} MiB of gradients, batch {options.batch} a rank, float32\n")
    _print(comm, ["step", "Gloo, ms", "ours, ms", "alone, ms", *_RATIOS])
    for name, wrap in (("DDP", ddp), ("FSDP2", fsdp2)):
        losses: Times = {}
        models = {way: wrap(model(options.width), group) for way, group in groups.items()}
        models["alone"] = model(options.width)
        ways = {
            way: step(own, options.batch, options.width, comm.rank, losses.setdefault(way, []))
            for way, own in models.items()
        }
        in_turns(comm, ways, _WARMUP)
        times = in_turns(comm, ways, options.repeats)
        for gloo, ours in zip(losses["Gloo"], losses["ours"], strict=True):
            if abs(gloo - ours) > 1e-3 * abs(gloo):
                raise RuntimeError(f"{name} trains to {gloo} over Gloo and to {ours} over ours")
        rows.append({"step": name, "bytes": nbytes, "times_s": times})
        ms = [f"{1e3 * median(seconds):.1f}" for seconds in times.values()]
        _print(comm, [name, *ms, *_ratios(times)])
    return rows


_RATIOS = ("Gloo / ours", "of the least")


def _ratios(times: Times) -> list[str]:
    gloo, ours = times["Gloo"], times["ours"]
    return [f"{median(gloo) / median(ours):.2f}", f"{min(gloo) / min(ours):.2f}"]


def _print(comm: MPI.Intracomm, cells: list[str]) -> None:
    """A row of the table; under a row of heads, which is the first, the rule."""
    if comm.rank == 0:
        print(f"| {' | '.join(cells)} |", flush=True)
        if cells[0] in ("call", "step", "bytes"):
            print(f"| --- |{' ---: |' * (len(cells) - 1)}", flush=True)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.torch_backend", description=__doc__)
    add = parser.add_argument
    add("--sizes", type=size, nargs="+", default=_SIZES, help="bytes of the larger buffer")
    add(
        "--repeats",
        type=int,
        help="repeats of each way; 30 for small calls and steps, 9 for others",
    )
    add("--steps", action="store_true", help="measure training steps in the place of calls")
    add("--small", action="store_true", help="measure calls of 8 bytes alone, without Gloo")
    text = "module of a third backend, which its register() makes known by this name; for calls"
    add("--beside", metavar="MODULE", help=text)
    add("--width", type=int, default=1024, help="width of the six layers")
    add("--batch", type=int, default=8, help="samples of a rank's step")
    add("--load", type=int, default=0, help="busy processes beside the ranks")
    add("-J", "--json", type=Path, help="write all times there")
    options = parser.parse_args(arguments)
    if sum(map(bool, (options.steps, options.small, options.beside))) > 1:
        parser.error("take one of --steps, --small and --beside; start them one after the other")
    options.repeats = options.repeats or (30 if options.steps or options.small else 9)
    return options


if __name__ == "__main__":
    sys.exit(main())
