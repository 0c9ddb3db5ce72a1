"""Messages with checksums: a byte that changes on its way is named."""

import numpy as np
import pytest
from mpi4py import MPI

from collectives import CollectiveError, Communicator, CorruptMessage, sparse_allreduce
from collectives.execution.transport.checked import CheckedTransport, Sealed
from collectives.execution.transport.mpi import MPITransport
from mpitrain.fields import partial, unused
from mpitrain.pipeline.mailbox import Expected, Mailbox, Spec


class OneByteWrong(CheckedTransport):
    """Rank 0's first message has another byte than was sealed."""

    @classmethod
    def envelope(cls, data):
        return _Changed(data) if MPI.COMM_WORLD.rank == 0 else Sealed(data)


class _Changed(Sealed):
    def seal(self):
        super().seal()
        self.data[len(self.data) // 2] ^= 4


@pytest.fixture(scope="module")
def checked():
    with Communicator(MPI.COMM_WORLD, transport=CheckedTransport) as comm:
        yield comm


@pytest.mark.skipif(MPI.COMM_WORLD.size != 2, reason="each of two ranks gets one vector")
def test_a_byte_of_a_sparse_sum_that_changes_on_its_way(monkeypatch):
    with Communicator(MPI.COMM_WORLD, transport=CheckedTransport) as comm:
        with monkeypatch.context() as patch:
            patch.setattr(Sealed, "seal", lambda sealed: None)
            with pytest.raises(CorruptMessage, match=f"from rank {1 - comm.rank} arrived changed"):
                sparse_allreduce(comm, np.array([1], np.uint32), np.ones(1), 1000)
        with pytest.raises(CollectiveError, match="left in the middle by CorruptMessage"):
            comm.Allreduce(MPI.IN_PLACE, np.ones(3), algorithm="ring")


def test_nothing_but_messages_with_checksums_is_chosen(checked):
    checked.Allreduce(MPI.IN_PLACE, checked.empty(1 << 18, np.float32))
    assert checked.last_plan.algorithm != "native"
    if checked.size > 1:
        said = ("native's messages carry no checksums", "x native")
        assert any(words in checked.last_plan.reason for words in said)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("how", ["blocking", "nonblocking", "persistent"])
def test_a_byte_that_changes_on_its_way(how):
    comm, message = MPI.COMM_WORLD, None
    with Communicator(comm, transport=OneByteWrong) as wrong:
        given = MPI.IN_PLACE, np.ones(100)
        plan = wrong.Allreduce_init(*given, algorithm="parameter_server")
        try:
            if how == "blocking":
                wrong.Allreduce(*given, algorithm="parameter_server")
            else:
                plan.Start()
                while how == "nonblocking" and not plan.Test():
                    pass
                plan.Wait()
        except CorruptMessage as error:
            message = str(error)
        messages = comm.allgather(message)
        comm.Barrier()
    assert messages[0] is None  # the server got only good messages
    for rank in range(1, comm.size):
        assert messages[rank].startswith("allreduce by parameter_server of 800 bytes, round ")
        assert f"rank {rank}: a message of" in messages[rank]
        assert "from rank 0 arrived changed: checksum " in messages[rank]


def test_ranks_are_named_by_their_numbers_in_the_job(checked):
    backwards = checked.Split(0, -checked.rank)
    data = np.zeros(8, np.uint8)
    sealed = Sealed(data)
    sealed.seal()
    data[3] = 1
    last = checked.size - 1
    with pytest.raises(CorruptMessage, match=rf"^rank {checked.rank}: .* from rank {last} arrived"):
        sealed.check(backwards, 0)
    sealed.free()
    backwards.Free()


@pytest.mark.parametrize("transport", [MPITransport, CheckedTransport])
@pytest.mark.parametrize("longest", [5, 70_000])
def test_activations_whose_sizes_vary(transport, longest):
    """Records, gradients with an unused field, and activations without samples."""

    def record(rank, count, length):
        kind = [("x", np.float64, (length, 2)), ("kept", bool, (length,))]
        found = np.zeros(count, kind)
        found["x"] = 10 * rank + length + np.arange(length * 2).reshape(length, 2)
        found["kept"][:, ::2] = True
        return found

    with Communicator(MPI.COMM_WORLD, transport=transport) as comm:
        after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        spec = Spec((), record(0, 1, 3).dtype)
        sizes = [(4, 2), (0, 3), (1, longest), (2, longest - 1), (3, 1)]
        expected = (Expected(before, 7, n, spec, is_gradient=length == 1) for n, length in sizes)
        mailbox = Mailbox(comm, [*expected], varies=True)
        for count, length in sizes:
            array = record(comm.rank, count, length)
            names = ("kept",) if length == 1 else ()
            mailbox.send(partial(array, names), after, 7, is_gradient=length == 1)
        for count, length in sizes:
            found, wanted = mailbox.receive(), record(before, count, length)
            assert found.dtype == wanted.dtype
            np.testing.assert_array_equal(np.asarray(found), wanted)
            assert unused(found) == ({"kept"} if length == 1 else set())
        mailbox.finish()


@pytest.mark.mpi(min_size=2)
def test_an_activation_that_changes_on_its_way(checked, monkeypatch):
    after, before = (checked.rank + 1) % checked.size, (checked.rank - 1) % checked.size
    mailbox = Mailbox(checked, [Expected(before, 7, 1, Spec((5,), np.dtype(np.float32)))])
    with monkeypatch.context() as patch:
        patch.setattr(Sealed, "seal", lambda sealed: None)  # the checksum is another message's
        mailbox.send(np.ones((1, 5), np.float32), after, 7)
    with pytest.raises(CorruptMessage, match=f"a message of 20 bytes from rank {before} arrived"):
        mailbox.receive()
    mailbox.finish()
