"""Every registered algorithm is proved, what it claims is what is proved, and breaking it shows."""

import numpy as np
import pytest
from mutants import mutants, results

from collectives.algorithms import build
from collectives.algorithms.segments import segmented
from collectives.analysis.claims import is_aligned, prove_claims
from collectives.analysis.verify import prove, verify
from collectives.contracts import contract
from collectives.errors import InvalidBuffer, ScheduleError
from collectives.schedule import Copy, Recv, RecvReduce, Schedule, Send, recvbuf, sendbuf, workspace
from tests.cases import every_algorithm, slow_case

#: All that fold, wrap round or are uneven in some way; more of the same takes minutes.
FEW = [*range(1, 14), 16, 17, 24]


def is_in_place_safe(schedule):
    try:
        prove(schedule, in_place=True)
    except (ScheduleError, InvalidBuffer):
        return False
    return True


@pytest.mark.parametrize("sizes", [FEW, slow_case([*range(14, 34), 64])], ids=["few", "more"])
@every_algorithm
def test_it_is_right_at_every_size_and_exactly_what_it_claims(algorithm, sizes):
    schedules = [algorithm.schedule(size) for size in sizes]
    if contract(algorithm.collective).rooted:
        for size in sizes:
            roots = range(1, size if size in (2, 3, 4, 5, 7, 8, 17) else min(size, 2))
            schedules += [algorithm.schedule(size, root) for root in roots]
    if "servers" in algorithm.options:
        schedules += [algorithm.schedule(n, servers=k) for k in (2, 3, 5) for n in sizes if n >= k]
    proofs = [prove_claims(algorithm, schedule) for schedule in schedules]
    several = [(proof, one) for proof, one in zip(proofs, schedules) if one.size > 1]
    assert all(proof.messages for proof, _ in several)
    # Both ends of a message are in rounds of one number, by which shared memory goes.
    assert all(one.aligned and is_aligned(one) for one in schedules)
    assert all(one.in_place or is_in_place_safe(one) for _, one in several) == algorithm.in_place
    assert all(p.uneven for p, one in several if one.size > 2) == algorithm.uneven
    if contract(algorithm.collective).reduces:
        assert all(proof.keeps_order for proof in proofs) == algorithm.keeps_order


@every_algorithm
@pytest.mark.parametrize("sizes", [(1, 3, 4), slow_case((2, 5, 7, 8))])
@pytest.mark.parametrize("overlap", [False, True])
def test_segments_of_every_algorithm(algorithm, overlap, sizes):
    for size in sizes:
        for count in (2, 3):
            schedule = segmented(algorithm.schedule(size), count, overlap)
            verify(schedule)
            if algorithm.in_place:
                verify(schedule, in_place=True)


@every_algorithm
@pytest.mark.parametrize("size", [2, 3, *(slow_case(n) for n in range(4, 10))])
def test_every_mutant_that_matters_is_rejected(algorithm, size):
    whole = algorithm.schedule(size)
    right = results(whole)
    rejected = harmless = 0
    for mutant in mutants(whole):
        try:
            prove(mutant)
        except ScheduleError:
            rejected += 1
        else:  # as where two rounds that do not depend on each other change places
            harmless += 1
            assert all(map(np.array_equal, results(mutant), right)), mutant
    assert rejected > harmless


def schedule(*programs, chunks=1, room=0, collective="allreduce"):
    """A schedule written out by hand, one list of rounds a rank."""
    return Schedule(
        collective, "by_hand", len(programs), chunks, room, True, lambda rank: iter(programs[rank])
    )


def exchange(peer):
    return (Send(peer, sendbuf[0]), RecvReduce(peer, recvbuf[0], sendbuf[0]))


def test_a_correct_schedule_by_hand():
    assert verify(schedule([exchange(1)], [exchange(0)])).keeps_order


BROKEN = {
    "never matched; rank 1 has finished": ([exchange(1)], []),
    "is in round 0": (
        [(Recv(1, recvbuf[0]),), (Send(1, sendbuf[0]),)],
        [(Recv(0, recvbuf[0]),), (Send(0, sendbuf[0]),)],
    ),
    "names rank 0, which is the rank itself": ([exchange(0)], [exchange(0)]),
    "names rank 2, which is no rank": ([exchange(2)], [exchange(0)]),
    "contribution of ranks [1] twice": (
        [exchange(1), (RecvReduce(1, recvbuf[0]),)], [exchange(0), (Send(0, sendbuf[0]),)],
    ),
    "expected chunk 0 of ranks [0, 1]": (
        [(Send(1, sendbuf[0]), Recv(1, recvbuf[0]))],
        [(Send(0, sendbuf[0]), Recv(0, recvbuf[0]))],
    ),
    "uses a chunk that its round is writing": (
        [(Copy(recvbuf[0], sendbuf[0]),), (Send(1, recvbuf[0]), Recv(1, recvbuf[0]))],
        [(Send(0, sendbuf[0]), Recv(0, recvbuf[0]))],
    ),
    "writes what another step is writing": (
        [(Copy(recvbuf[0], sendbuf[0]), Recv(1, recvbuf[0]))], [(Send(0, sendbuf[0]),)],
    ),
    "writes to sendbuf": ([(Recv(1, sendbuf[0]),)], [(Send(0, sendbuf[0]),)]),
    "names w0, which does not exist": ([(Recv(1, workspace[0]),)], [(Send(0, sendbuf[0]),)]),
    "before anything was written there": ([(Recv(1, recvbuf[0]),)], [(Send(0, recvbuf[0]),)]),
    "ends with recvbuf[0] never written": (
        [exchange(1)], [(Send(0, sendbuf[0]), Recv(0, workspace[0]))],
    ),
}  # fmt: skip


@pytest.mark.parametrize("reason", BROKEN)
def test_the_error_says_what_is_wrong(reason):
    room = 1 if "never written" in reason else 0
    with pytest.raises(ScheduleError) as caught:
        verify(schedule(*BROKEN[reason], room=room))
    assert reason in str(caught.value)
    assert "rank 0" in str(caught.value)
    assert "round 0" in str(caught.value)  # the grid


def test_different_trees_on_two_ranks_are_an_error():
    """(0+1)+2 on ranks 0 and 1, but 0+(1+2) on rank 2: equal on paper, not in floating point."""
    first = [(Send(1, sendbuf[0]), Send(2, sendbuf[0])), (Recv(1, recvbuf[0]),)]
    second = [
        (RecvReduce(0, recvbuf[0], sendbuf[0]), Send(2, sendbuf[0])),
        (RecvReduce(2, recvbuf[0]),),
        (Send(0, recvbuf[0]),),
    ]
    third = [
        (RecvReduce(1, recvbuf[0], sendbuf[0]), RecvReduce(0, recvbuf[0])),
        (Send(1, sendbuf[0]),),
    ]
    with pytest.raises(ScheduleError, match="another order than on rank 0"):
        verify(schedule(first, second, third))


def test_pieces_of_unequal_size_do_not_change_places():
    program = [(Copy(recvbuf[0], sendbuf[1]), Copy(recvbuf[1], sendbuf[0]))]
    with pytest.raises(ScheduleError, match="piece 1 of a block in place 0"):
        verify(schedule(program, chunks=2))


def test_a_complaint_names_both_ends_of_the_message():
    """Rank 1 sends its second chunk where rank 0 expects the first, and it is the last round."""
    crossed = schedule(
        [(Send(1, sendbuf[0:2]), Recv(1, workspace[0])), (RecvReduce(1, recvbuf[0], sendbuf[0]),)],
        [(Send(0, sendbuf[0]), Recv(0, recvbuf[0:2])), (Send(0, sendbuf[1]),)],
        chunks=2,
        room=1,
    )
    longer = schedule(
        [(Send(1, sendbuf[0]),)], [(Recv(0, recvbuf[0:2]),)], collective="broadcast", chunks=2
    )
    for wrong, complaint in (
        (crossed, "rank 0 round 1: r0=s0+<1 reduces chunk 0 of ranks [0] and expected chunk 0 from "
            "rank 1, whose round 1 sends s1 = chunk 1 of ranks [1]"),
        (longer, "rank 1 round 0: r0:2<0 expected 2 chunks from rank 0, whose round 0 sends s0 = "
            "chunk 0 of ranks [0]"),
    ):  # fmt: skip
        with pytest.raises(ScheduleError) as caught:
            verify(wrong)
        assert complaint in str(caught.value)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8, 16])
def test_how_often_a_contribution_is_rounded(size):
    """Once at every hop of a ring, once a round of a butterfly."""
    in_rounds = (size - 1).bit_length()
    for name, wanted in (("ring", size - 1), ("butterfly", in_rounds), ("direct", size - 1)):
        assert verify(build("allreduce", name, size)).roundings == wanted, name
