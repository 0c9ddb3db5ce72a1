"""The command: see :mod:`tests.soak`."""

import argparse
import sys

from mpi4py import MPI

from tests.soak import Soak
from tests.soak.calls import COLLECTIVES, WAYS
from tests.soak.kinds import KINDS


def main() -> int:
    """Soaks; 1 for a difference or a leak."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="for so long (60)")
    parser.add_argument("--rounds", type=int, default=0, help="this many rounds rather than a time")
    parser.add_argument("--first", type=int, default=0, help="the first round's number (0)")
    parser.add_argument("--seed", type=int, default=1, help="of what is drawn (1)")
    parser.add_argument("--keep-going", type=int, default=1, help="end after so many differences")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, help="of buffers; default: all")
    parser.add_argument("--names", nargs="+", choices=COLLECTIVES, help="default: all")
    parser.add_argument("--ways", nargs="+", choices=sorted({*WAYS}), help="default: all")
    options = parser.parse_args()
    limits = {
        name: chosen
        for name in ("kinds", "names", "ways")
        if (chosen := getattr(options, name)) is not None
    }
    hint = "python -m tests.soak" + "".join(
        f" --{name} " + " ".join(f"'{one}'" for one in chosen) for name, chosen in limits.items()
    )
    soak = Soak(MPI.COMM_WORLD, options.seed, options.keep_going, limits, hint)
    report = soak.run(options.seconds, options.rounds, options.first)
    if MPI.COMM_WORLD.rank == 0:
        print(f"seed {options.seed}, {MPI.get_vendor()[0]}: {report}", flush=True)
    return int(not report.is_good)


if __name__ == "__main__":
    sys.exit(main())
