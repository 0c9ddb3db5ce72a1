"""Reports of a run: to a file, to the console, and to those that the job names."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from mpitrain import extras
from mpitrain.config import Config
from mpitrain.metrics.console import console
from mpitrain.metrics.records import Record, Write
from mpitrain.metrics.writer import json_lines


@contextmanager
def recorder(
    config: Config,
    steps: int,
    done: int = 0,
    *,
    tests_again: bool = False,
    keys: Mapping[str, Mapping[str, Any]] | None = None,
) -> Iterator[Write]:
    """Opens the reports of a run; yields a function to call with each record.

    Args:
        config: the job.
        steps: steps of the whole run.
        done: steps of an earlier run that this one continues, whose reports stay.
        tests_again: replace the test after these steps, which comes again.
        keys: the job's keys by table, as the record of the start has them; default: ``config``'s.

    Raises:
        ReportError: ``config.run.dir`` cannot be made or written, now or later, or a sink fails.
    """
    folder = Path(config.run.dir)
    with ExitStack() as stack:
        sinks = [stack.enter_context(json_lines(folder / "metrics.jsonl", done, tests_again))]
        sinks.append(stack.enter_context(console(steps, config.run.log_every)))
        for name in config.run.records:
            sinks.append(stack.enter_context(extras.sink(name, config, done, keys)))

        def write(record: Record) -> None:
            for sink in sinks:
                sink(record)

        yield write
