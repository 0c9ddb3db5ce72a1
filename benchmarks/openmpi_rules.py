"""A tuning table as rules for Open MPI's ``coll_tuned``.

    python -m benchmarks.openmpi_rules tuned.json > rules

Open MPI has many of the same algorithms.  Where one of them was the fastest of ours on several
nodes, it is likely to be a good choice for Open MPI as well; use the file with
``--mca coll_tuned_use_dynamic_rules 1 --mca coll_tuned_dynamic_rules_filename FILE``.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import program
from collectives.algorithms import parse
from collectives.calls.choice import Rule, Table
from collectives.calls.tables import load
from collectives.errors import CollectiveError

#: Numbers of the collectives in ``coll_base_functions.h``, and of their algorithms in
#: ``coll_tuned_*_decision.c``.
_NUMBERS: dict[str, tuple[int, dict[str, int]]] = {
    "allgather": (0, {"bruck": 2, "recursive_doubling": 3, "ring": 4, "direct": 1}),
    "allreduce": (
        2,
        {"butterfly": 3, "ring": 4, "halving_doubling": 6, "binomial_tree": 2, "hierarchical": 4},
    ),
    "alltoall": (3, {"linear": 1, "pairwise": 2, "bruck": 3}),
    "broadcast": (7, {"chain": 3, "binomial_tree": 6, "double_binary_tree": 4}),
    "gather": (9, {"direct": 1, "binomial_tree": 2}),
    "reduce": (11, {"direct": 1, "chain": 3, "binomial_tree": 5}),
    "scatter": (15, {"direct": 1, "binomial_tree": 2}),
}
#: Bytes of the smallest segment.
_LEAST_SEGMENT = 1024


def rules_file(table: Table) -> str:
    """The text of the file: for each collective, numbers of ranks, sizes and algorithms.

    Raises:
        CollectiveError: nothing that Open MPI has was measured on several nodes.
    """
    # On one node, ours go through slots and say nothing of Open MPI's messages.
    far = [e for e in table.entries if e.memory == "numpy" and e.ranks_per_node < e.ranks]
    known = [e for e in far if e.collective in _NUMBERS and e.mpi.startswith("Open MPI")]
    if not known:
        raise CollectiveError(
            "the table has no entry for ordinary memory on several nodes by Open MPI, as the one "
            "that is built in; measure one there: mpirun python -m collectives tune -o tuned.json"
        )
    collectives = sorted({e.collective for e in known}, key=lambda c: _NUMBERS[c][0])
    lines = [f"{len(collectives)} # collectives"]
    for collective in collectives:
        number, algorithms = _NUMBERS[collective]
        entries = sorted((e for e in known if e.collective == collective), key=lambda e: e.ranks)
        lines += [f"{number} # {collective}", f"{len(entries)} # numbers of ranks"]
        for entry in entries:
            lines += [f"{entry.ranks} # ranks", f"{len(entry.rules)} # sizes"]
            lines += [_rule(rule, algorithms) for rule in entry.rules]
    return "\n".join(lines) + "\n"


def _rule(rule: Rule, algorithms: dict[str, int]) -> str:
    """Bytes from which it holds, algorithm (0: Open MPI's own choice), fan-out, segment size."""
    name, options = parse(rule.algorithm)
    number, count, nbytes = algorithms.get(name, 0), options.get("segments"), 0
    if isinstance(count, int) and count > 1 and number and name != "hierarchical":
        nbytes = max(_LEAST_SEGMENT, rule.from_bytes // count)
    return f"{rule.from_bytes} {number} 0 {nbytes} # {rule.algorithm}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the file of rules."""
    parser = argparse.ArgumentParser(prog="benchmarks.openmpi_rules", description=__doc__)
    parser.add_argument("table", type=Path, nargs="?", help="file of tune (default: that in use)")

    def act(options: argparse.Namespace) -> int:
        print(rules_file(load(options.table)), end="")
        return 0

    return program.run(parser, arguments, act)


if __name__ == "__main__":
    sys.exit(main())
