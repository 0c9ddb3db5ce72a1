"""The command: see :mod:`tests.torch_drawn`."""

import argparse
import faulthandler
import sys

import torch.distributed as dist

from collectives.torch.register import register
from tests.torch_drawn import run_drawn
from tests.torch_drawn.calls import KINDS


def main() -> int:
    """Draws calls; 1 for a difference."""
    parser = argparse.ArgumentParser(prog="python -m tests.torch_drawn", description=__doc__)
    parser.add_argument("--calls", type=int, default=1000, help="how many (1000)")
    parser.add_argument("--first", type=int, default=0, help="the first call's number (0)")
    parser.add_argument("--seed", type=int, default=1, help="of what is drawn (1)")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, help="default: all")
    parser.add_argument("--hangs", type=float, default=900.0, help="seconds that it may take (900)")
    parser.add_argument("--gloo", action="store_true", help="over Gloo, too")
    options = parser.parse_args()
    faulthandler.dump_traceback_later(options.hangs, exit=True)
    register()
    dist.init_process_group("collectives", "mpi://")
    report = run_drawn(options.seed, options.calls, options.first, options.kinds, options.gloo)
    if dist.get_rank() == 0:
        print(f"seed {options.seed}: {report}", flush=True)
    dist.destroy_process_group()
    return int(bool(report.differences))


if __name__ == "__main__":
    sys.exit(main())
