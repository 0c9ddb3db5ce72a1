"""Blocks and buffers that 31 bits cannot count; slow, and up to 16 GiB on both ranks together."""

import numpy as np
import pytest
from mpi4py import MPI

from collectives import InvalidBuffer
from collectives.contracts import CONTRACTS, Member
from tests.mpi.collectives.forms import METHODS, fresh

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(MPI.COMM_WORLD.size != 2, reason="2 ranks fill the memory"),
]
ITEMS = (1 << 31) + 5
#: Moved by eights, these are fewer items of ours, and no fewer of MPI's.
BY_EIGHTS = (1 << 31) + 8
HALF = ITEMS // 2 + 1
#: Items of a block by the name that its contract gives; only two ranks know those of pairs.
UNEQUAL = {0: 5, 1: ITEMS, (0, 0): 5, (0, 1): ITEMS, (1, 0): 3, (1, 1): 4}
#: One of our algorithms for each collective; it takes unequal blocks where the collective does.
OURS = {
    "allreduce": "butterfly",
    "reduce_scatter": "ring",
    "allgather": "ring",
    "alltoall": "pairwise",
    "broadcast": "double_binary_tree",
    "reduce": "binomial_tree",
    "gather": "direct",
    "scatter": "direct",
    "scan": "chain",
    "exscan": "chain",
}
IN_BLOCKS = [name for name in OURS if CONTRACTS[name].block is not None]
#: One for each test, whose end frees what plans hold.
comm = pytest.fixture(fresh)


def marks(lengths, memory):
    """The first, middle and last item of each block, by its number."""
    for j, block in enumerate(np.split(memory, np.cumsum(lengths)[:-1]) if lengths else []):
        yield j, block, [0, len(block) // 2, len(block) - 1]


def check(comm, collective, items, memory, algorithm, forms=("",)):
    """Calls on blocks of ``items`` each, ``None``: unequal ones; in place if that copies nothing.
    Every mark must be the sum that the contract says, and all else zero."""
    contract = CONTRACTS[collective]
    member = Member(comm.rank, 2, root=1 if contract.rooted else 0)

    def lengths(buffer, count):
        names = [contract.block and contract.block(member, buffer, j) for j in range(count)]
        return [items or UNEQUAL[name] for name in names]

    def specification(lengths, memory):
        takes_lengths = items is None and len(lengths) > 1 and contract.block
        return [memory, lengths] if takes_lengths else memory if lengths else None

    def value(rank, j, k):
        return 1 + rank + 2 * j + 10 * k

    sent = lengths("sendbuf", contract.send_blocks(member))
    received = lengths("recvbuf", contract.recv_blocks(member))
    can = contract.in_place is not None and collective not in ("alltoall", "exscan")
    place = contract.place(member) if can else None
    make = comm.empty if memory == "shared" else np.zeros
    recv = make(sum(received), np.int8)
    send = make(sum(sent) if place is None else 0, np.int8)  # the ranks make it together
    if place is not None:
        send = recv[sum(received[:place]) :][: sum(sent)]
    given = [MPI.IN_PLACE if place is not None else specification(sent, send)]
    given.append(specification(received, recv))
    name = METHODS.get(collective, collective.capitalize()) + ("" if items else "v")
    if collective == "broadcast":
        given = [recv]
    elif collective == "reduce_scatter" and items is None:
        name, given = "Reduce_scatter", [send, recv, [UNEQUAL[0], UNEQUAL[1]]]
    for form in forms:
        for _, block, at in marks(received, recv):
            block[at] = 0
        for j, block, at in marks(sent, send):
            block[at] = [value(comm.rank, j, k) for k in range(3)]
        keywords = {"root": member.root} if contract.rooted else {}
        call = getattr(comm, f"I{name.lower()}" if form else name)
        request = call(*given, algorithm=algorithm, **keywords)
        if form:
            request.Wait()
        for j, block, at in marks(received, recv):
            if (result := contract.result(member, j)) is not None:
                wanted = [sum(value(r, result.chunk, k) for r in result.ranks) for k in range(3)]
                assert block[at].tolist() == wanted
                assert np.count_nonzero(block) == 3


@pytest.mark.parametrize("collective", OURS)
def test_messages_that_31_bits_do_not_count(comm, collective):
    check(comm, collective, ITEMS, "ordinary", OURS[collective])


@pytest.mark.parametrize("collective", OURS)
def test_auto_takes_ours_where_31_bits_do_not_count_a_block(comm, collective):
    check(comm, collective, BY_EIGHTS, "ordinary", "auto")
    assert comm.last_plan.algorithm != "native"


@pytest.mark.parametrize("collective", OURS)
def test_arrays_of_the_node_that_31_bits_do_not_count(comm, collective):
    """By ours, whose segments grow with the array."""
    check(comm, collective, ITEMS, "shared", "auto", forms=("", "I"))
    assert "segments" in comm.last_plan.algorithm


@pytest.mark.parametrize("algorithm", ["auto", "native", "ours"])
@pytest.mark.parametrize("collective", IN_BLOCKS)
def test_blocks_that_31_bits_count_only_one_by_one(comm, collective, algorithm):
    check(comm, collective, HALF, "ordinary", {"ours": OURS[collective]}.get(algorithm, algorithm))


@pytest.mark.parametrize("algorithm", ["auto", "ours"])
@pytest.mark.parametrize("collective", IN_BLOCKS)
def test_one_block_of_several_that_31_bits_do_not_count(comm, collective, algorithm):
    """In some, the root cannot tell the others' counts from its own, and all choose alike."""
    seen_by_two = collective in ("gather", "scatter", "alltoall")
    if algorithm == "auto" and seen_by_two and MPI.get_vendor()[0] == "Open MPI":
        pytest.skip("plain mpi4py fails there, too")
    check(comm, collective, None, "ordinary", {"ours": OURS[collective]}.get(algorithm, algorithm))


def test_items_of_more_bytes_than_31_bits_count(comm):
    """One item, as programs do whose MPI counts no more; its numbers lie one behind the other."""
    memory = np.zeros(ITEMS, np.int8)
    kind, keep = MPI.BYTE.Create_contiguous(ITEMS).Commit(), MPI.Op.Create(lambda *_: None)
    memory[[0, -1]] = comm.rank
    comm.Bcast([memory, 1, kind], 1)
    assert memory[[0, -1]].tolist() == [1, 1]
    comm.Allreduce(MPI.IN_PLACE, [memory, 1, kind], keep)
    with pytest.raises(InvalidBuffer, match="derived types"):
        comm.Allreduce(MPI.IN_PLACE, [memory, 1, kind], keep, algorithm="ring")
