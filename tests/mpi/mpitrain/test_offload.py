"""Optimiser state in files."""

import errno
import os

import numpy as np
import pytest

from mpitrain.config import ConfigError
from mpitrain.training.build import mapped
from tests.mpi.mpitrain.layouts import curve, equal, job

pytestmark = pytest.mark.at_most(5)


@pytest.mark.parametrize(("zero", "files"), [(1, 2), (3, 20)])
def test_state_in_mapped_files_changes_no_bit(comm, folder, zero, files):
    """With ZeRO-3, shards of parameters and gradients, too: four arrays for each of the tensors."""
    offload = str(folder / "state")
    plain, mapped = (job("gpt", "float32", zero=zero, offload=path) for path in ("", offload))
    (one, first), (two, second) = (curve(comm, config, steps=3) for config in (plain, mapped))
    np.testing.assert_array_equal(one, two)
    equal(first, second)
    assert len(list((folder / "state").glob(f"rank{comm.rank}.*"))) >= files


def test_state_of_a_job_is_not_changed_by_another_one(comm, folder):
    first = mapped(folder, comm.rank)(10, np.float32)
    first[:] = 7.0
    mapped(folder, comm.rank)(10, np.float32)[:] = 8.0
    assert (first == 7.0).all()


@pytest.mark.parametrize("why", ["No space left", "cannot be made there"])
def test_a_folder_without_room_or_that_cannot_be_made_is_refused(comm, folder, monkeypatch, why):
    """On all ranks, whichever finds it."""

    def full(handle, start, size):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if comm.rank == 0:
        if why == "No space left":
            monkeypatch.setattr(os, "posix_fallocate", full)
        else:
            (folder / "state").write_text("")
    comm.barrier()
    with pytest.raises(ConfigError, match=rf"parallel.offload.*{why}"):
        curve(comm, job("gpt", "float32", zero=1, offload=str(folder / "state")), steps=1)
