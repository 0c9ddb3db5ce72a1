"""A tuning table that is likely to hold on other machines, for one that ships with a program.

    python -m benchmarks.portable tuned.json -o portable.json

It has rules from 32 KiB on: clear ones of shared memory, and very clear ones of ordinary memory.
"""

import argparse
import sys
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

import msgspec

from benchmarks import program
from collectives.bench.tune import situation
from collectives.calls.choice import Entry, Kind, Rule
from collectives.calls.tables import load

#: Below these bytes or this gain, another machine, or this one tomorrow, often finds another
#: algorithm faster.  In ordinary memory, where both move the same bytes, a butterfly that
#: was 1.9 times as fast as native took 1.3 times as long on another machine of the same kind.
_PORTABLE_BYTES = 32 << 10
_PORTABLE_RATIO: dict[Kind, float] = {"shared": 1.3, "numpy": 2.5}


def portable(entries: list[Entry]) -> list[Entry]:
    """Entries of a machine's table that are likely to hold on other machines.

    They have our algorithms from 32 KiB on, by rules that are clear in shared memory, where these
    save a copy, and far clearer in ordinary memory.  Entries of ordinary memory without such a rule
    are left out, so that calls there stay native.
    """
    found = []
    for entry in entries:
        rules = _portable(entry.rules, entry.memory)
        if entry.memory in _PORTABLE_RATIO and (entry.memory != "numpy" or len(rules) > 1):
            found.append(msgspec.structs.replace(entry, rules=rules))
    return found


def _portable(rules: list[Rule], memory: Kind) -> list[Rule]:
    found, least = [Rule(0, "native", 1.0)], _PORTABLE_RATIO.get(memory, 0.0)
    for rule, after in zip_longest(rules, rules[1:]):
        if after is not None and after.from_bytes <= _PORTABLE_BYTES:
            continue
        # A rule from fewer bytes has held at all sizes since; its ratio is that of the first.
        since = rule.from_bytes < _PORTABLE_BYTES and memory != "numpy"
        holds = since or rule.ratio >= least
        start = max(rule.from_bytes, _PORTABLE_BYTES)
        if not holds:
            rule = Rule(start, "native", 1.0)
        if rule.algorithm != found[-1].algorithm:
            found.append(Rule(start, rule.algorithm, rule.ratio))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the table, and prints the situations that were left out."""
    parser = argparse.ArgumentParser(prog="benchmarks.portable", description=__doc__)
    parser.add_argument("table", type=Path, help="file of 'collectives tune'")
    parser.add_argument("-o", "--output", type=Path, required=True, help="file to write")

    def act(options: argparse.Namespace) -> int:
        table = load(options.table)
        kept = portable(table.entries)
        there = {situation(entry) for entry in kept}
        for left in (one for one in map(situation, table.entries) if one not in there):
            print(f"left out, as it may not hold elsewhere: {', '.join(map(str, left))}")
        found = msgspec.structs.replace(table, entries=kept)
        options.output.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1))
        return 0

    return program.run(parser, arguments, act)


if __name__ == "__main__":
    sys.exit(main())
