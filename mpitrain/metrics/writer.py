"""The writer of ``metrics.jsonl``: a line of JSON for each record."""

import errno
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import msgspec

from collectives.files import read_regular
from mpitrain import extras
from mpitrain.files import begin, being_written, is_at
from mpitrain.metrics.records import Back, Epoch, Record, Step, Write


class ReportError(RuntimeError):
    """A report cannot be written; the message names the file and why."""


@contextmanager
def json_lines(path: Path, done: int = 0, tests_again: bool = False) -> Iterator[Write]:
    """Opens a file with a line a record, complete up to the last record at any time.

    An earlier file keeps its records up to step ``done``, or with ``tests_again`` up to the test
    after it; where none is done, it becomes ``metrics.earlier.jsonl``.  With each record but a
    step's the file's name is looked up, as records of a file that was removed, or replaced by
    another job, would be lost.  ReportError: it cannot be written, now or later.
    """
    with ExitStack() as stack:
        with being_written(path, ReportError):
            if not done and path.is_file():
                path.replace(path.with_suffix(f".earlier{path.suffix}"))
            kept = _until(path, done, tests_again) if done and path.exists() else ()
            file = stack.enter_context(begin(path, kept))

        def write(record: Record) -> None:
            line = msgspec.json.encode(record) + b"\n"
            with being_written(path, ReportError):
                if not (isinstance(record, Step) or is_at(file.fileno(), path)):
                    raise OSError(errno.ESTALE, "it was removed or replaced")
                if file.write(line) != len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        yield write


def _until(path: Path, done: int, tests_again: bool) -> Iterator[bytes]:
    """Lines before the first of a later step, or before the first that is no record.

    Where a run went back to ``done`` or before, those of the steps that came again are the later
    ones.
    """
    data, step, found = read_regular(path), 0, []
    with suppress(ValueError):
        found.extend(extras.lines(path, data))
    backs = [n for n, (_, one) in enumerate(found) if isinstance(one, Back) and one.step <= done]
    for number, (line, record) in enumerate(found):
        if number >= max(backs, default=0):
            step = max(step, getattr(record, "step", step))  # a checkpoint of an earlier one
            if record is None or step > done:
                return
            if tests_again and step == done and isinstance(record, Epoch):
                return
        yield line
