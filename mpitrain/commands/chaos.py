"""``mpitrain chaos``: drills from the command line."""

import argparse
import shlex
import sys
from pathlib import Path

import msgspec

from mpitrain.chaos.drill import Drills, Outcome
from mpitrain.chaos.faults import KINDS, draw
from mpitrain.chaos.outside import Disk, Outside
from mpitrain.chaos.table import markdown
from mpitrain.config import ConfigError, expect, load


def chaos(options: argparse.Namespace, drills: Drills | None = None) -> int:
    """Run a job once for each fault and seed; prints a line each, then the table.

    Leaves ``outcomes.jsonl`` and ``table.md`` in the folder.

    Returns:
        1 if a drill went wrong, else 0.

    Raises:
        ConfigError: an unknown fault, or a job that cannot be read.
    """
    kinds = options.faults.split(",") if options.faults else list(KINDS)
    for kind in kinds:
        if kind not in KINDS:
            raise ConfigError(f"no fault {kind!r}; there are {', '.join(KINDS)}")
    expect(load(options.config, options.set), "drill", command="mpitrain chaos")
    options.output.mkdir(parents=True, exist_ok=True)
    disks: dict[str, Outside] = {kind: Disk(kind) for kind in ("full", "readonly")}
    drills = drills or Drills(
        shlex.split((options.launcher or _launcher()).replace("{n}", str(options.ranks))),
        options.config,
        options.output.absolute(),
        options.set,
        disks,
    )
    weights, steps = drills.reference()
    outcomes: list[Outcome] = []
    with (options.output / "outcomes.jsonl").open("wb") as file:
        for kind in kinds:
            for seed in range(options.seeds):
                fault = draw(kind, seed, options.ranks, steps)
                outcome = drills.drill(fault, weights)
                outcomes.append(outcome)
                file.write(msgspec.json.encode(outcome) + b"\n")
                file.flush()
                print(f"{fault}: {outcome.verdict} ({outcome.seconds:.1f} s)", flush=True)
                if outcome.verdict == "skipped":
                    break
    table = markdown(outcomes)
    (options.output / "table.md").write_text(table)
    print(table)
    return 0 if all(outcome.good for outcome in outcomes) else 1


def _launcher() -> str:
    """The ``mpiexec`` beside this Python, or the one that the shell finds."""
    beside = Path(sys.executable).with_name("mpiexec")
    return f"{beside if beside.exists() else 'mpiexec'} -n {{n}}"
