"""``mpitrain`` with a fault: a rank does something to itself before a step of its training.

    mpirun -n 4 python -m tests.drills.train train job.toml --fault 'kill rank=1 step=20'

In a job script, MPITRAIN_WRAP='python -m tests.drills.train --fault kill,rank=1,step=20' puts it
before ``python -m mpitrain train``, whose words it takes over.
"""

import argparse
import sys
from typing import Any
from unittest.mock import patch

from collectives import Communicator
from mpitrain.__main__ import main as mpitrain
from mpitrain.commands import ranks
from mpitrain.config import Config
from mpitrain.training.loop import Loop
from tests.drills.faults import parse
from tests.drills.inject import Injector


def main() -> int:
    """Runs ``mpitrain`` with all words but ``--fault`` and its value."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--fault", type=parse)
    own, words = parser.parse_known_args()
    if words[1:3] == ["-m", "mpitrain"]:
        del words[:3]
    make = ranks.loop_of_job
    injectors: list[Injector] = []

    def with_fault(comm: Communicator, config: Config, **given: Any) -> Loop:
        if not injectors:  # one for all trainers of a run that shrinks
            injectors.append(Injector(own.fault, comm))
        if config.parallel.checksums:
            comm = Communicator(comm, transport=injectors[0].transport())
        return make(comm, config, before_step=injectors[0], **given)

    if own.fault is None:
        return mpitrain(words)
    with patch.object(ranks, "loop_of_job", with_fault):
        return mpitrain(words)


if __name__ == "__main__":
    sys.exit(main())
