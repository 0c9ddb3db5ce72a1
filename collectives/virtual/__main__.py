"""Runs a program of mpi4py on virtual ranks: python -m collectives.virtual -n 8 program.py."""

import argparse
import os
import sys
from pathlib import Path

from collectives.about import load_mpi_or_exit
from collectives.commands.arguments import add_ranks, add_virtual, network, size
from collectives.run.program import named_profile
from collectives.virtual import Deadlock, VirtualCluster, end_process, install
from collectives.virtual.generators import script


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m collectives.virtual", description=__doc__)
    add_ranks(parser, 4)
    add_virtual(parser)
    eager = "longest message whose Send ends before its receive; 0: all wait, and hang as they may"
    parser.add_argument("--eager", type=size, default="64K", metavar="BYTES", help=f"{eager} (64K)")
    text = "at the end, print who waited for whom, and write FILE.html and FILE.json (profile)"
    parser.add_argument("--profile", type=os.path.abspath, metavar="FILE", help=text)
    parser.add_argument("program", type=Path, help="file of the program")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    valued = ("-n", "--ranks", "--topology", "--alpha", "--bandwidth", "--slower", "--eager")
    options = parser.parse_args(named_profile(sys.argv[1:], valued))
    options.program.exists() or parser.error(f"there is no file {options.program}")
    load_mpi_or_exit(parser)
    install()
    program = script(options.program, *options.arguments)
    modelled = network(options, options.ranks)
    moves = {name: getattr(options, name) for name in ("slower", "async_progress", "eager")}
    cluster = VirtualCluster(options.ranks, modelled, **moves)
    if options.profile:
        from collectives.virtual import profile  # of the MPI that is installed now

        profile.record(cluster)
    try:
        cluster.run(program)
    except Deadlock as error:
        print(error, file=sys.stderr)
        end_process(1)
    told = profile.write(cluster, Path(options.profile)) if options.profile else cluster.table()
    print(told, file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
