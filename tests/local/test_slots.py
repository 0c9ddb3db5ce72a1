"""Schedules through slots of the node: each rank's calls one by one, in rare orders."""

from collections import defaultdict, deque
from unittest.mock import Mock

import numpy as np
import pytest

from collectives.algorithms import ALGORITHMS, build
from collectives.algorithms.segments import segmented
from collectives.contracts import contract
from collectives.execution import slot_rounds
from collectives.execution.local import connect
from collectives.execution.messages import Operands
from collectives.execution.plan import Binding
from collectives.execution.slot_rounds import bind_slots, extent_of
from collectives.execution.transport import slots as transport
from collectives.execution.transport.flags import Tick
from collectives.execution.transport.slots import InLine, Slots
from tests.cases import slow_case
from tests.local.references import lengths, reference
from tests.local.shared_ranks import CountingNode, interleave, steps_of
from tests.local.test_orders import orders

#: Bytes of a slot here, so that a block of so many items goes in several pieces.
SLOT, COUNT = 512, 333


class SlotNode(CountingNode):
    def __init__(self, rank, size, shared):
        made = defaultdict(lambda: memoryview(np.zeros(32, np.int64)))
        super().__init__(rank, [None] * size, shared.setdefault("counters", made))
        self.shared, self.made = shared, 0

    def allocate(self, nbytes):
        self.made += 1
        return self.shared.setdefault(
            self.made, [np.zeros(2 * SLOT * self.size, np.uint8) for _ in range(self.size)]
        )


def placed(schedule, rank, inputs, in_place):
    sent, received = lengths(schedule, COUNT)[rank]
    send = inputs if sent else None
    recv = np.full(received, -99, inputs.dtype) if received else None
    member = schedule.member(rank)._replace(chunks=1)
    first = schedule.contract.place(member) if in_place else None
    if first is not None and recv is not None:
        recv[first * COUNT : first * COUNT + inputs.size] = inputs
        send = None
    return Operands(send, recv), recv


def run(schedules, in_place, choose, dtype=float, wide=None, local=0):
    """Each rank's plans one after the other; ``choose`` says who is tried first.

    ``local``: ranks of a node, the last of which may have fewer; 0: all are on one.
    """
    size = schedules[0].size
    transports, nodes = connect(size), defaultdict(dict)

    def calls(rank):
        node, place = divmod(rank, local or size)
        ranks = range(size)[node * (local or size) :][: local or size]
        slots = Slots(SlotNode(place, len(ranks), nodes[node]), ranks, transports[rank])
        for turn, schedule in enumerate(schedules):
            rng = np.random.default_rng(turn)
            inputs = [rng.integers(0, 10, n).astype(dtype) for n, _ in lengths(schedule, COUNT)]
            operands, recv = placed(schedule, rank, inputs[rank].copy(), in_place)
            combine = np.maximum if schedule.contract.idempotent else np.add
            if operands.send is not None or operands.recv is not None:
                extent = extent_of(schedule, range(size))
                plan = bind_slots(schedule, slots, operands, combine, Binding(), extent, "", wide)
                yield from steps_of(plan)
            wanted = reference(schedule.collective, inputs, rank, schedule.root)
            if wanted is not None:
                np.testing.assert_array_equal(recv, wanted)

    interleave({rank: calls(rank) for rank in range(size)}, choose, schedules)


def everywhere(*quick):
    for algorithm in (a for a in ALGORITHMS if a.collective != "barrier"):
        for size in (2, 3, 4, 5):
            marks = pytest.mark.slow if size not in (quick or (3,)) else ()
            name = f"{algorithm.collective}-{algorithm.name}-{size}"
            yield pytest.param(algorithm.schedule(size), marks=marks, id=name)


@pytest.fixture(autouse=True)
def small_slots(monkeypatch):
    monkeypatch.setattr(transport, "SLOT_BYTES", SLOT)
    monkeypatch.setattr(slot_rounds, "SLOT_BYTES", SLOT)


@pytest.mark.parametrize("schedule", [*everywhere()])
def test_one_run_follows_another_in_any_order_of_the_ranks(schedule):
    one_sided = build("broadcast", "chain", schedule.size)
    for choose in [*orders(schedule.size)][::2]:
        run([schedule, schedule, one_sided, schedule], False, choose)
        if contract(schedule.collective).in_place is not None:
            run([schedule, one_sided, schedule], True, choose)


@pytest.mark.parametrize("local", [2, *(slow_case(n) for n in (1, 3))])
@pytest.mark.parametrize("schedule", [*everywhere(4)])
def test_messages_to_other_nodes_go_beside_the_slots(schedule, local):
    in_segments = segmented(schedule, 3, overlap=True)
    for choose in [*orders(schedule.size)][::3]:
        run([schedule, in_segments], False, choose, local=local)
        if contract(schedule.collective).in_place is not None:
            run([in_segments, schedule], True, choose, local=local)


@pytest.mark.parametrize("schedule", [*everywhere()])
def test_numbers_of_16_bits_are_widened_in_the_slots(schedule):
    if (blocks := contract(schedule.collective)).reduces:
        for in_place in (False, blocks.in_place is not None):
            run([schedule] * 2, in_place, sorted, np.float16, np.dtype(np.float32))


def test_a_rank_does_not_wait_for_a_slot_that_it_has_read(monkeypatch):
    """An exchange needs one count: none says that a slot is free."""
    said, tick = [], Tick.__call__
    monkeypatch.setattr(Tick, "__call__", lambda self: said.append(self.value) or tick(self))
    run([build("allreduce", "butterfly", 2)] * 3, True, lambda ranks: ranks)
    exchanges, lengths = -(-COUNT * 8 // SLOT), 2
    assert len(said) == 3 * 2 * (exchanges + lengths)


def test_a_plan_that_copies_its_input_begins_in_line_and_counts_the_copy():
    """Ranks start plans in one order; which of them goes on first is each rank's own."""
    slots, items = Slots(SlotNode(0, 2, {})), np.zeros(2 * COUNT)
    given = build("alltoall", "pairwise", 2), slots, Operands(None, items, aside=True)
    plan = bind_slots(*given, None, Binding(), extent_of(given[0], range(2)), "")
    plan.Start()
    assert [place.plan() for place in slots.line] == [plan]
    assert plan.own_nbytes >= items.nbytes
    plan.abandon()


def test_a_run_waits_for_those_before_it_and_moves_them_along():
    line = deque()
    first, second = InLine(line), InLine(line)
    before = Mock()
    before.Test.side_effect = lambda: before.Test.call_count == 3 and not first.leave()
    first.plan = lambda: before
    first.Start()
    second.Start()
    assert [second.Test() for _ in range(3)] == [False, False, True]
    assert before.Test.call_count == 3
