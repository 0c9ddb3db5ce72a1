"""Checkpoints that move between a V and a loop."""

from itertools import islice

import numpy as np
import pytest
from mpi4py import MPI
from msgspec.structs import replace

from mpitrain.checkpoint.saving import resume
from mpitrain.start import start
from tests.mpi.mpitrain.layouts import curve, in_folder, job, keep, whole

pytestmark = [pytest.mark.mpi, pytest.mark.skipif(MPI.COMM_WORLD.size not in (2, 3), reason="V")]

RANKS = MPI.COMM_WORLD.size


def test_a_checkpoint_moves_from_a_v_to_a_loop_and_back(comm, folder):
    config = in_folder(job("gpt", pipe=RANKS, schedule="zb_v"), folder)
    _, expected = curve(comm, config, 6)
    for done, name in enumerate(("zb_v", "1f1b", "dualpipe_v")):
        parallel = replace(config.parallel, schedule=name)
        with start(comm, replace(config, parallel=parallel)) as trainer:
            assert bool(resume(trainer.parts)) == (done > 0)
            list(islice(trainer.run_epoch(0), 2))
            keep(trainer)
            moved = whole(comm, trainer)
    for name, values in expected.items():
        np.testing.assert_allclose(moved[name], values, rtol=0, atol=1e-10)
