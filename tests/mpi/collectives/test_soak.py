"""The soak's quick form; ``make soak`` takes an hour."""

import numpy as np
import pytest
from mpi4py import MPI

from collectives import Communicator
from tests.soak import Soak

pytestmark = [pytest.mark.mpi, pytest.mark.quick_on(3)]


def test_calls_on_buffers_of_every_kind(capfd):
    with capfd.disabled():  # a call that raises ends the job, and must be seen
        report = Soak(MPI.COMM_WORLD, seed=1).run(rounds=2)
    assert report.is_good, str(report)
    assert report.calls.total() > 500 and len(report.kinds) > 20


class Off(Communicator):
    """Other bytes than the sum's."""

    def Allreduce(self, sendbuf, recvbuf, op=MPI.SUM, *, algorithm=None):
        super().Allreduce(sendbuf, recvbuf, op, algorithm="native")
        if isinstance(recvbuf, np.ndarray) and recvbuf.size:
            recvbuf.view(np.uint8)[...] += 1


class Beyond(Communicator):
    """Writes before the beginning of its buffer."""

    def Allreduce(self, sendbuf, recvbuf, op=MPI.SUM, *, algorithm=None):
        super().Allreduce(sendbuf, recvbuf, op, algorithm="native")
        if isinstance(recvbuf, np.ndarray) and recvbuf.base is not None:
            recvbuf.base[0] += 1


class Careless(Communicator):
    """Changes what is sent."""

    def Allreduce(self, sendbuf, recvbuf, op=MPI.SUM, *, algorithm=None):
        super().Allreduce(sendbuf, recvbuf, op, algorithm="native")
        if isinstance(sendbuf, np.ndarray) and sendbuf.size:
            sendbuf.view(np.uint8)[0] += 1


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (Off, "of the result is"),
        (Beyond, "the receive buffer, slice_of_a_larger_one: byte 0 of its memory was"),
        (Careless, "the send buffer, "),
    ],
)
def test_it_finds_what_is_wrong(capfd, wrong, words):
    kinds = ["slice_of_a_larger_one"]
    limits = {"names": ["Allreduce"], "ways": ["blocking"], "kinds": kinds}
    report = Soak(MPI.COMM_WORLD, 1, limits=limits, make=wrong).run(rounds=1)
    assert report.differences == 1
    said = "".join(MPI.COMM_WORLD.allgather(capfd.readouterr().out))
    assert words in said and "--seed 1 --first 0 --rounds 1" in said
