"""Schedules in files, in the format of ``torch.distributed.pipelining``.

A file has a row for each stage, and in it the stage's passes in order, with commas between:
``0F0,0F1,3F0,3B0``.  A pass is a virtual stage, a letter (F: forward, B: backward, I and W: its
halves by the input and by the weights) and a micro-batch.  Empty fields are idle slots; torch's
entries for messages and shards say what follows from the passes, and are passed over.
"""

import csv
import io
import re
from collections.abc import Iterator
from pathlib import Path

from collectives.files import replace
from mpitrain.pipeline.actions import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Pipeline,
    Update,
)
from mpitrain.pipeline.replay import Report
from mpitrain.pipeline.schedules import SCHEDULES, PipelineSchedule

_KINDS = {kind.letter: kind for kind in (Forward, Backward, BackwardInput, BackwardWeight)}
_PASS = re.compile(r"(\d{1,6})([FBIW])(\d{1,6})")
_BOTH = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
_IMPLIED = re.compile(r"\d+(SEND_[FB]|RECV_[FB]|UNSHARD|RESHARD|REDUCE_GRAD)\d*")


def find(name: str) -> PipelineSchedule:
    """The schedule of a name, or of a file whose name ends with ``.csv``.

    Raises:
        ValueError: there is no such schedule or file, or the file is not a schedule.
    """
    if name.endswith(".csv"):
        return read(Path(name))[0]
    if name not in SCHEDULES:
        raise ValueError(
            f"no schedule {name!r}; there are {', '.join(SCHEDULES)}, and files that end with .csv"
        )
    return SCHEDULES[name]


def read(path: Path) -> tuple[PipelineSchedule, Pipeline]:
    """The schedule in a file, and the pipeline that it is for, with one replica of each stage.

    It is not proved here: see :func:`mpitrain.pipeline.replay.replay`.

    Raises:
        ValueError: the file cannot be read, or is not a schedule.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    rows = [list(_entries(path, row)) for row in csv.reader(text.splitlines()) if row]
    owners = sorted({(virtual, stage) for stage, row in enumerate(rows) for virtual, _, _ in row})
    stages = tuple(stage for _, stage in owners)
    counts = {stages.count(stage) for stage in range(len(rows))}
    if [virtual for virtual, _ in owners] != list(range(len(owners))) or len(counts) != 1:
        has = ", ".join(f"{virtual} in row {row}" for virtual, row in owners) or "none"
        raise ValueError(
            f"{path}: virtual stages must be counted from 0, each in one row, and each row have "
            f"equally many; it has {has}"
        )
    chunks, micro_batches = counts.pop(), 1 + max(m for row in rows for *_, m in row)
    dealt = {v: stages[:v].count(stage) for v, stage in owners}

    def generate(pipeline: Pipeline, stage: int, replica: int) -> Iterator[Action]:
        """Passes in a file."""
        own = pipeline.own(stage, replica)
        if (pipeline.stages, len(own)) != (len(rows), micro_batches):
            raise ValueError(
                f"{path} is of {len(rows)} stages and {micro_batches} micro-batches a replica, not "
                f"{pipeline.stages} and {len(own)}; set train.micro_batches"
            )
        for virtual, letter, m in rows[stage]:
            yield _KINDS[letter](own[m], dealt[virtual])
        yield Update(0)

    schedule = PipelineSchedule(path.stem, generate, chunks, lambda count, v: stages[v])
    return schedule, schedule.pipeline((1,) * len(rows), micro_batches, chunks)


def _entries(path: Path, row: list[str]) -> Iterator[tuple[int, str, int]]:
    """The passes of a row, as (virtual stage, letter, micro-batch)."""
    for field in row:
        both = _BOTH.fullmatch(field.strip())
        for entry in (both[1] if both else field).split(";"):
            if found := _PASS.fullmatch(entry.strip()):
                yield int(found[1]), found[2], int(found[3])
            elif entry.strip() and not _IMPLIED.fullmatch(entry.strip()):
                raise ValueError(
                    f"{path}: {entry.strip()[:40]!r} is no pass; give a virtual stage, F, B, I or "
                    "W, and a micro-batch, as in 0F0"
                )


def write(report: Report, path: Path) -> None:
    """Write a proved schedule that updates once, of stages with one replica.

    Raises:
        ValueError: the schedule updates as it goes, or has replicas, which the format cannot say.
    """
    pipeline = report.pipeline
    rows = []
    for (stage, _), own in report.actions.items():
        *passes, _ = own
        if max(pipeline.replicas) > 1 or any(isinstance(action, Update) for action in passes):
            raise ValueError("a file has one row for each stage, and one update at its end")
        rows.append(
            [
                f"{pipeline.dealt[stage][action.chunk]}{action.letter}{action.micro_batch}"
                for action in passes
                if not isinstance(action, Update)
            ]
        )
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    replace(path, text.getvalue())
