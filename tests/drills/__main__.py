"""Faults tried out on a job, on ranks that this program starts.

python -m tests.drills tests/drills/drill.toml -n 4 --seeds 3
"""

import argparse
import shlex
import sys
from pathlib import Path

import msgspec

from collectives.commands.arguments import positive
from mpitrain.config import ConfigError, expect, load
from tests.drills.drill import Drills, Outcome
from tests.drills.faults import KINDS, draw
from tests.drills.outside import Disk, Outside
from tests.drills.table import markdown


def run(options: argparse.Namespace, drills: Drills | None = None) -> int:
    """Runs a job once for each fault and seed; the status, 1 if a drill went wrong.

    Prints a line each, then the table; leaves ``outcomes.jsonl`` and ``table.md`` in the folder.
    """
    kinds = options.faults.split(",") if options.faults else list(KINDS)
    for kind in kinds:
        if kind not in KINDS:
            raise ConfigError(f"no fault {kind!r}; there are {', '.join(KINDS)}")
    expect(load(options.config, options.set), "drill", command="tests.drills")
    options.output.mkdir(parents=True, exist_ok=True)
    disks: dict[str, Outside] = {kind: Disk(kind) for kind in ("full", "readonly")}
    drills = drills or Drills(
        shlex.split(options.launcher.replace("{n}", str(options.ranks))),
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


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=Path, help="the job file")
    parser.add_argument("--seeds", type=positive, default=3, help="runs of each kind (3)")
    parser.add_argument("--faults", metavar="KIND,...", help="try only these kinds")
    parser.add_argument("--set", action="append", default=[], metavar="TABLE.KEY=VALUE")
    parser.add_argument("-o", "--output", type=Path, default=Path("runs/drills"))


def main() -> int:
    kinds = "; ".join(f"{name}: {kind.text}" for name, kind in KINDS.items())
    parser = argparse.ArgumentParser(prog="tests.drills", description=f"Kinds: {kinds}.")
    add_options(parser)
    parser.add_argument("-n", "--ranks", type=positive, default=4, help="ranks of each run (4)")
    beside = Path(sys.executable).with_name("mpiexec")
    parser.add_argument(
        "--launcher",
        default=f"{beside if beside.exists() else 'mpiexec'} -n {{n}}",
        help="command before python; {n} becomes the number of ranks",
    )
    try:
        return run(parser.parse_args())
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
