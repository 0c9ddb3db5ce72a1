"""Every registered algorithm is proved, what it claims is what is proved, and breaking it shows."""

from functools import cache

import numpy as np
import pytest
from mutants import mutants, results

from collectives.algorithms import ALGORITHMS, build
from collectives.algorithms.segments import segmented
from collectives.analysis.verify import prove, verify
from collectives.contracts import contract
from collectives.errors import InvalidBuffer, ScheduleError
from collectives.schedule import Copy, Recv, RecvReduce, Schedule, Send, recvbuf, sendbuf, workspace
from tests.cases import every_algorithm, slow_case

#: All that fold, wrap round or are uneven in some way; more of the same takes minutes.
FEW = [*range(1, 14), 16, 17, 24]
at_sizes = pytest.mark.parametrize(
    "sizes", [FEW, slow_case([*range(14, 34), 64])], ids=["few", "more"]
)
#: Several tests ask for the same proof.
proof = cache(lambda algorithm, size: verify(algorithm.schedule(size)))


@at_sizes
@every_algorithm
def test_proved_at_every_size(algorithm, sizes):
    for size in sizes:
        assert proof(algorithm, size).messages > 0 or size == 1


def is_in_place_safe(schedule):
    try:
        prove(schedule, in_place=True)
    except (ScheduleError, InvalidBuffer):
        return False
    return True


@at_sizes
@every_algorithm
def test_in_place_exactly_where_claimed(algorithm, sizes):
    assert algorithm.in_place <= (contract(algorithm.collective).in_place is not None)
    safe = [is_in_place_safe(algorithm.schedule(size)) for size in sizes if size > 1]
    assert all(safe) == algorithm.in_place


@every_algorithm
def test_every_root(algorithm):
    if contract(algorithm.collective).rooted:
        for size in (2, 3, 4, 5, 7, 8, 17):
            for root in range(size):
                verify(algorithm.schedule(size, root))


@at_sizes
@every_algorithm
def test_unequal_blocks_exactly_where_claimed(algorithm, sizes):
    assert all(proof(algorithm, size).uneven for size in sizes if size > 2) == algorithm.uneven


REDUCTIONS = [a for a in ALGORITHMS if contract(a.collective).reduces]


@at_sizes
@pytest.mark.parametrize("algorithm", REDUCTIONS, ids=lambda a: f"{a.collective}-{a.name}")
def test_order_is_kept_where_claimed(algorithm, sizes):
    kept = [proof(algorithm, size).keeps_order for size in sizes]
    if contract(algorithm.collective).rooted:
        kept += [verify(algorithm.schedule(size, 1)).keeps_order for size in sizes if size > 1]
    if "servers" in algorithm.options:
        kept += [verify(algorithm.schedule(n, servers=3)).keeps_order for n in sizes if n > 3]
    assert all(kept) == algorithm.keeps_order


@pytest.mark.parametrize("servers", [1, 2, 3, 5])
def test_sharded_parameter_server(servers):
    for size in range(servers, 12):
        schedule = build("allreduce", f"parameter_server:servers={servers}", size)
        verify(schedule)
        verify(schedule, in_place=True)


@every_algorithm
@pytest.mark.parametrize("sizes", [(1, 3, 4), slow_case((2, 5, 7, 8))])
@pytest.mark.parametrize("overlap", [False, True])
def test_segments_of_every_algorithm(algorithm, overlap, sizes):
    for size in sizes:
        for count in (1, 2, 3):
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
        [exchange(1), (RecvReduce(1, recvbuf[0]),)],
        [exchange(0), (Send(0, sendbuf[0]),)],
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
        [(Copy(recvbuf[0], sendbuf[0]), Recv(1, recvbuf[0]))],
        [(Send(0, sendbuf[0]),)],
    ),
    "writes to sendbuf": ([(Recv(1, sendbuf[0]),)], [(Send(0, sendbuf[0]),)]),
    "which does not exist": ([(Recv(1, recvbuf[1]),)], [(Send(0, sendbuf[0]),)]),
    "names w0, which does not exist": ([(Recv(1, workspace[0]),)], [(Send(0, sendbuf[0]),)]),
    "before anything was written there": ([(Recv(1, recvbuf[0]),)], [(Send(0, recvbuf[0]),)]),
    "ends with recvbuf[0] never written": (
        [exchange(1)],
        [(Send(0, sendbuf[0]), Recv(0, workspace[0]))],
    ),
}


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
    programs = (
        [(Send(1, sendbuf[0]), Send(2, sendbuf[0])), (Recv(1, recvbuf[0]),)],
        [
            (RecvReduce(0, recvbuf[0], sendbuf[0]), Send(2, sendbuf[0])),
            (RecvReduce(2, recvbuf[0]),),
            (Send(0, recvbuf[0]),),
        ],
        [
            (RecvReduce(1, recvbuf[0], sendbuf[0]), RecvReduce(0, recvbuf[0])),
            (Send(1, sendbuf[0]),),
        ],
    )
    first = [programs[0][0], (Recv(1, recvbuf[0]),)]
    with pytest.raises(ScheduleError, match="another order than on rank 0"):
        verify(schedule(first, programs[1], programs[2]))


def test_pieces_of_unequal_size_do_not_change_places():
    program = [(Copy(recvbuf[0], sendbuf[1]), Copy(recvbuf[1], sendbuf[0]))]
    with pytest.raises(ScheduleError, match="piece 1 of a block in place 0"):
        verify(schedule(program, chunks=2))


def test_reducing_different_chunks_is_an_error():
    crossed = [
        [(Send(1, sendbuf[0:1]), RecvReduce(1, recvbuf[1], sendbuf[1]))],
        [(Send(0, sendbuf[0:1]), RecvReduce(0, recvbuf[1], sendbuf[1]))],
    ]
    with pytest.raises(ScheduleError, match="reduces chunk"):
        verify(schedule(*crossed, chunks=2))


def test_a_complaint_names_both_ends_of_the_message():
    """Rank 1 sends its second chunk where rank 0 expects the first, and it is the last round."""
    crossed = schedule(
        [(Send(1, sendbuf[0:2]), Recv(1, workspace[0])), (RecvReduce(1, recvbuf[0], sendbuf[0]),)],
        [(Send(0, sendbuf[0]), Recv(0, recvbuf[0:2])), (Send(0, sendbuf[1]),)],
        chunks=2,
        room=1,
    )
    with pytest.raises(ScheduleError) as caught:
        verify(crossed)
    assert (
        "rank 0 round 1: r0=s0+<1 reduces chunk 0 of ranks [0] and expected chunk 0 from rank 1, "
        "whose round 1 sends s1 = chunk 1 of ranks [1]"
    ) in str(caught.value)
    longer = schedule(
        [(Send(1, sendbuf[0]),)], [(Recv(0, recvbuf[0:2]),)], collective="broadcast", chunks=2
    )
    with pytest.raises(ScheduleError) as caught:
        verify(longer)
    assert (
        "rank 1 round 0: r0:2<0 expected 2 chunks from rank 0, whose round 0 sends s0 = chunk 0 of "
        "ranks [0]"
    ) in str(caught.value)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8, 16])
def test_how_often_a_contribution_is_rounded(size):
    """Once at every hop of a ring, once a round of a butterfly."""
    rounded = {
        name: verify(build("allreduce", name, size)).roundings
        for name in ("ring", "butterfly", "direct")
    }
    halvings = size.bit_length() - 1
    folded = int(size != 1 << halvings)
    assert rounded == {"ring": size - 1, "butterfly": halvings + folded, "direct": size - 1}
