"""Bytes that collectives bring out of a host, the MPI library's own beside ours: no time.

    python -m tests.cluster.hosts --hosts 2 --ranks 2 -- -m benchmarks.host_bytes    # as root

Bytes say what a link of any speed has to carry, and do not depend on what else the machine does.
They are counted at the interface, with TCP's headers and acknowledgements.  The table is Markdown.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from mpi4py import MPI

from collectives import Communicator
from collectives.bench.measure import Buffers, Case
from collectives.bench.tune import candidates
from collectives.commands.arguments import size
from collectives.contracts import CONTRACTS

_COLLECTIVES = [name for name in CONTRACTS if name not in ("barrier", "scan", "exscan")]


def main(arguments: Sequence[str] | None = None) -> int:
    """Counts; rank 0 prints a row for each collective."""
    parser = argparse.ArgumentParser(prog="benchmarks.host_bytes", description=__doc__)
    parser.add_argument("--interface", default="eth0", help="between the hosts (eth0)")
    parser.add_argument("--bytes", type=size, default=4 << 20, help="of the larger buffer (4M)")
    options = parser.parse_args(arguments)
    comm = Communicator(MPI.COMM_WORLD)
    counter = Path(f"/sys/class/net/{options.interface}/statistics/tx_bytes")
    rows = [["collective", "native", "least of ours", "by"], ["---", "---:", "---:", "---"]]
    for collective in _COLLECTIVES:
        algorithms = candidates(collective, comm.size)
        is_broadcast = collective == "broadcast"  # which MPI has in place alone
        how = np.dtype(np.float32), "sum", algorithms, 1
        case = Case(collective, options.bytes, *how, in_place=is_broadcast)
        sent = {each: _sent(comm, case, each, counter) for each in algorithms}
        native = sent.pop("native")
        least = min(sent, key=lambda each: round(sent[each], 1))
        rows.append([f"`{collective}`", f"{native:.1f}", f"{sent[least]:.1f}", f"`{least}`"])
    if comm.rank == 0:
        print(*(f"| {' | '.join(row)} |" for row in rows), sep="\n", flush=True)
    return 0


def _sent(comm: Communicator, case: Case, algorithm: str, counter: Path) -> float:
    """Bytes of the host that sends the most in one call, as a multiple of the larger buffer."""
    buffers = Buffers(comm, case)
    plan = comm.plan(buffers.arguments, algorithm)
    plan()  # which makes the connections
    comm.Barrier(algorithm="native")
    before = int(counter.read_text())
    comm.Barrier(algorithm="native")
    plan()
    comm.Barrier(algorithm="native")
    most = comm.allreduce(int(counter.read_text()) - before, MPI.MAX)
    plan.Free()
    return most / case.nbytes


if __name__ == "__main__":
    sys.exit(main())
