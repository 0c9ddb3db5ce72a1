"""Check of the folder that checkpoints go to."""

import shutil
from contextlib import suppress
from pathlib import Path
from time import sleep
from typing import Any
from uuid import uuid4

from mpi4py import MPI

from mpitrain.doctor.finding import Finding, fail, in_parts, ok, runs_of, warn
from mpitrain.files import write_whole

_LEAST_BYTES = 1 << 30
#: A network file system may show a new file late.
_PATIENCE_S = 5.0
_POLL_S = 0.1


def checkpoints(comm: MPI.Intracomm, folder: Path) -> Finding:
    """Check that all ranks read a file that rank 0 writes and renames, as for a checkpoint."""
    token = comm.bcast(uuid4().hex)
    target = folder / f".doctor-{token}"

    def write(_: Any) -> int:
        if comm.rank:
            return 0
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(target, lambda beside: beside.write_text(token))
        return shutil.disk_usage(folder).free

    def read(free: int) -> tuple[bool, int]:
        for _ in range(round(_PATIENCE_S / _POLL_S)):
            if target.exists() and target.read_text() == token:
                return True, free
            sleep(_POLL_S)
        return False, free

    finding = in_parts(
        comm,
        "checkpoints",
        [write, read],
        lambda found: judge_checkpoints(folder, found),
        "choose a folder that can be written, on a file system that all nodes mount",
    )
    if comm.rank == 0:
        with suppress(OSError):  # it was never made; the finding says why
            target.unlink()
    return finding


def judge_checkpoints(folder: Path, found: list[tuple[bool, int]]) -> Finding:
    """Judge whether all ranks see the file, and there is room for more.

    ``found[0][1]`` is rank 0's free bytes.
    """
    blind = [rank for rank, (seen, _) in enumerate(found) if not seen]
    if blind:
        return fail(
            f"{folder}: what rank 0 writes, ranks {runs_of(blind)} do not see",
            "put run.dir on a file system that all nodes mount",
        )
    free = found[0][1]
    if free < _LEAST_BYTES:
        return warn(
            f"{folder}: {free >> 20} MiB free",
            "make room, or choose a run.dir with more: a checkpoint takes 8 to 16 bytes a "
            "parameter",
        )
    return ok(f"{folder}: {free >> 30} GiB free")
