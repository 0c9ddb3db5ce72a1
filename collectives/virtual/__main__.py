"""``python -m collectives.virtual -n 8 program.py``: runs a program of mpi4py on virtual ranks."""

import argparse
import sys
from pathlib import Path

from collectives.commands.arguments import add_virtual, network, rank_count
from collectives.run.program import add_profile, add_program, parsed
from collectives.virtual import Deadlock, VirtualCluster, end_process, install
from collectives.virtual.generators import script


def main() -> int:
    """Runs a program; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m collectives.virtual", description=__doc__)
    parser.add_argument("-n", "--ranks", type=rank_count, default=4, help="number of ranks (4)")
    add_virtual(parser)
    add_profile(parser)
    add_program(parser)
    options = parsed(parser, sys.argv[1:])
    install()
    file = options.profile and Path(options.profile).absolute()
    program = script(options.script, *options.arguments, is_module=options.module)
    modelled = network(options, options.ranks)
    cluster = VirtualCluster(
        options.ranks, modelled, slower=options.slower, async_progress=options.async_progress
    )
    if file:
        from collectives.virtual import profile  # of the MPI that is installed now

        profile.record(cluster)
    try:
        cluster.run(program)
    except Deadlock as error:
        print(error, file=sys.stderr)
        end_process(1)
    print(profile.write(cluster, file) if file else cluster.table(), file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
