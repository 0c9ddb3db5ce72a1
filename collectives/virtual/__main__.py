"""Runs a program of mpi4py on virtual ranks: python -m collectives.virtual -n 8 program.py."""

import argparse
import sys
from pathlib import Path

from collectives.commands.arguments import add_ranks, add_virtual, network
from collectives.virtual import Deadlock, VirtualCluster, end_process, install
from collectives.virtual.generators import script


def main() -> int:
    """Runs a program; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m collectives.virtual", description=__doc__)
    add_ranks(parser, 4)
    add_virtual(parser)
    parser.add_argument("program", type=Path, help="file of the program")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    options = parser.parse_args()
    install()
    program = script(options.program, *options.arguments)
    modelled = network(options, options.ranks)
    cluster = VirtualCluster(
        options.ranks, modelled, slower=options.slower, async_progress=options.async_progress
    )
    try:
        cluster.run(program)
    except Deadlock as error:
        print(error, file=sys.stderr)
        end_process(1)
    print(cluster.table(), file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
