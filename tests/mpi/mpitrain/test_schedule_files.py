"""Jobs whose schedule is a file, and checkpoints that move between a V and a loop."""

from itertools import islice

import numpy as np
import pytest
from mpi4py import MPI
from msgspec.structs import replace

from mpitrain.checkpoint.saving import resume
from mpitrain.config import ConfigError
from mpitrain.pipeline.replay import replay
from mpitrain.pipeline.schedule_file import write
from mpitrain.pipeline.schedules import SCHEDULES
from mpitrain.start import start
from tests.mpi.mpitrain.layouts import curve, equal, in_folder, job, keep, whole

pytestmark = [pytest.mark.mpi, pytest.mark.skipif(MPI.COMM_WORLD.size not in (2, 3), reason="V")]

RANKS = MPI.COMM_WORLD.size


def written(comm, name, path):
    """A job of micro-batches by a schedule in a file."""
    config = job("gpt", pipe=RANKS, schedule=str(path))
    schedule = SCHEDULES[name]
    shape = schedule.pipeline((1,) * RANKS, config.train.micro_batches, 2)
    write(replay(schedule.generate, shape), path)
    comm.Barrier()
    return config


def test_a_schedule_from_a_file_trains_as_the_one_it_was_written_of(comm, folder):
    config = written(comm, "zb_v", folder / f"own{comm.rank}.csv")
    path = str(folder / "own0.csv")
    found = curve(comm, replace(config, parallel=replace(config.parallel, schedule=path)), 3)
    expected = curve(comm, job("gpt", pipe=RANKS, schedule="zb_v"), 3)
    np.testing.assert_array_equal(found[0], expected[0])
    equal(found[1], expected[1])


def test_ranks_with_other_files_of_a_name_all_fail(comm, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a folder of each rank
    name = "zb_v" if comm.rank else "v_half"
    config = written(comm, name, tmp_path / "own.csv")
    config = replace(config, parallel=replace(config.parallel, schedule="own.csv"))
    with pytest.raises(ConfigError, match="passes in parallel"), start(comm, config):
        pass


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
