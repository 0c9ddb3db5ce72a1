"""A check, and the run of checks in a process of their own."""

import importlib
import json
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from time import perf_counter
from typing import NamedTuple

#: Word that a process which runs checks prints before each result.
RESULT = "RESULT "


class Check(NamedTuple):
    """Something to verify.

    Attributes:
        stage: number of its stage.
        name: for people.
        run: returns a detail for people, or raises; collective over the ranks.
        ranks: on how many, each in a job of its own.
        seconds: after which it has failed.
        is_killed: one of its ranks is; it works if the job ends then, with an error.
    """

    stage: int
    name: str
    run: Callable[[], str]
    ranks: tuple[int, ...] = (1,)
    seconds: float = 60.0
    is_killed: bool = False


#: Stage whose checks plant faults.
CONTROLS = 4
#: Stages in which torch shares the memory.
OF_TORCH = (9, 10, 11)
#: Modules of this package with checks, in the order of their stages.
STAGES = ("facts", "kernels", "roads", "controls", "layers", "trainer", "overlap", "leaving")
if find_spec("torch"):
    STAGES += ("modules", "backend")
    STAGES += ("models",) if find_spec("transformers") else ()


def checks() -> list[Check]:
    """All of them, stage after stage."""
    return sorted(_each(), key=lambda one: one.stage)


def _each() -> Iterator[Check]:
    """One module after the other, so that only who looks for a check of torch loads it."""
    for name in STAGES:
        yield from importlib.import_module(f"tests.gpu.{name}").CHECKS


def main(names: Sequence[str], *, dry_run: bool) -> int:
    """Run checks on this rank, one after the other; rank 0 prints the results."""
    found = (next(one for one in _each() if one.name == name) for name in names)
    return sum([_is_bad(check, dry_run) for check in found])


@contextmanager
def stand_in(check: Check) -> Iterator[None]:
    """In it, there are two GPUs whose work is queued, and done when it is queued where torch, which
    computes on the CPU, shall see it; nothing may happen that nobody has ordered."""
    from pytest import MonkeyPatch  # a GPU's machine may have none

    from tests import queued_cupy

    is_torchs = check.stage in OF_TORCH
    with MonkeyPatch.context() as patch:
        cupy = queued_cupy.install(patch, queued_cupy.Machine(devices=2, prompt=is_torchs))
        yield
        if not is_torchs and check.stage != CONTROLS:
            cupy.machine.expect_no_races()


def _is_bad(check: Check, dry_run: bool) -> bool:
    """Run a check; an error of one rank alone ends the job, as the others may wait."""
    from mpi4py import MPI

    comm, start = MPI.COMM_WORLD, perf_counter()
    try:
        with stand_in(check) if dry_run else nullcontext():
            told = True, check.run()
    except Exception as error:
        traceback.print_exc()
        told = False, " ".join(f"{type(error).__name__}: {error}".split())[:300]
        if comm.size > 1:
            _print(check, told, start)
            comm.Abort(1)
    every = comm.allgather(told)
    bad = [f"rank {rank}: {text}" for rank, (works, text) in enumerate(every) if not works]
    if comm.rank == 0:
        _print(check, (not bad, bad[0] if bad else told[1]), start)
    return bool(bad)


def _print(check: Check, told: tuple[bool, str], start: float) -> None:
    print(f"{RESULT}{json.dumps((check.name, *told, perf_counter() - start))}", flush=True)


if __name__ == "__main__":
    words = sys.argv[1:]
    found = main([word for word in words if word != "--dry-run"], dry_run="--dry-run" in words)
    sys.exit(found > 0)
