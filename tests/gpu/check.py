"""What a check is, and its run in a process of its own."""

import importlib
import json
import sys
import traceback
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import NamedTuple

#: What a process that runs a check prints before its result.
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


#: Modules of this package with checks, in the order of their stages.
STAGES = ("facts", "kernels", "roads", "controls", "layers", "trainer", "overlap", "leaving")
if find_spec("torch"):
    STAGES += ("modules",)


def checks() -> list[Check]:
    """All of them, stage after stage."""
    return sorted(_each(), key=lambda one: one.stage)


def _each() -> Iterator[Check]:
    """One module after the other, so that only who looks for a check of torch loads it."""
    for name in STAGES:
        yield from importlib.import_module(f"tests.gpu.{name}").CHECKS


def main(name: str, *, dry_run: bool) -> int:
    """Run one check on this rank; rank 0 prints the result."""
    if dry_run:
        from tests import strict_cupy

        strict_cupy.install()
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    found = next(one for one in _each() if one.name == name)
    try:
        told = True, found.run()
    except Exception as error:
        traceback.print_exc()
        text = " ".join(f"{type(error).__name__}: {error}".split())
        told = False, text[:300]
        if comm.size > 1:  # the others may wait
            print(f"{RESULT}{json.dumps(told)}", flush=True)
            comm.Abort(1)
    every = comm.allgather(told)
    bad = [f"rank {rank}: {text}" for rank, (works, text) in enumerate(every) if not works]
    if comm.rank == 0:
        print(f"{RESULT}{json.dumps((not bad, bad[0] if bad else told[1]))}", flush=True)
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], dry_run="--dry-run" in sys.argv))
