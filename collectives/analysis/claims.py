"""Proves an algorithm and everything that it claims; a program's own before it is registered."""

import hashlib
from collections import defaultdict
from dataclasses import replace
from itertools import zip_longest

from collectives.algorithms import REGISTRY, Algorithm
from collectives.algorithms.guard import guarded
from collectives.analysis.verify import Proof, prove, verify
from collectives.contracts import contract
from collectives.errors import CollectiveError, InvalidBuffer, ScheduleError, UnknownAlgorithm
from collectives.schedule import Copy, Schedule, Send

#: Numbers of ranks at which :func:`register` proves an algorithm; other numbers, and options, are
#: proved before a communicator first uses them.
SIZES = range(1, 10)
#: Reasons of a refusal, by the claim that the proof has not confirmed.
_REFUTED = {
    "keeps_order": "it does not reduce in rank order",
    "uneven": "it moves blocks to places of other blocks' lengths",
}


def prove_claims(algorithm: Algorithm, schedule: Schedule) -> Proof:
    """Proves ``schedule`` and what ``algorithm`` claims of it.

    Raises:
        ScheduleError: it is wrong, or a claim is.
    """
    proof = verify(schedule)
    if schedule.in_place:
        try:
            prove(schedule, in_place=True)
        except InvalidBuffer as error:
            raise ScheduleError(f"{schedule} says in_place=True, and {error}") from None
        except ScheduleError as error:
            raise ScheduleError(f"{error}; correct it, or say in_place=False") from None
    for claim, why in _REFUTED.items():
        if getattr(algorithm, claim) and not getattr(proof, claim):
            raise ScheduleError(f"{schedule} says {claim}=True, and {why}")
    if algorithm.uniform:
        _expect_uniform(schedule)
    return proof


def _expect_uniform(schedule: Schedule) -> None:
    """Each round has equal numbers, distances and lengths of messages on every rank."""
    first: list[list[tuple[bool, int, int]]] = []
    for rank in range(schedule.size):
        every = [
            sorted(
                (isinstance(s, Send), (s.peer - rank) % schedule.size, s.chunk.length)
                for s in steps
                if not isinstance(s, Copy)
            )
            for steps in schedule.rounds(rank)
        ]
        first = first or every
        for number, (ways, wanted) in enumerate(zip_longest(every, first)):
            if ways != wanted:
                raise ScheduleError(
                    f"{schedule} says uniform=True, and rank {rank} round {number} is unlike that "
                    "of rank 0"
                )


def is_aligned(schedule: Schedule) -> bool:
    """Whether both ends of every message lie in rounds of the same number."""
    sent: dict[tuple[int, int], list[int]] = defaultdict(list)
    arrived: dict[tuple[int, int], list[int]] = defaultdict(list)
    for rank in range(schedule.size):
        for number, steps in enumerate(schedule.rounds(rank)):
            for step in steps:
                if isinstance(step, Send):
                    sent[rank, step.peer].append(number)
                elif not isinstance(step, Copy):
                    arrived[step.peer, rank].append(number)
    return sent == arrived


def kept(schedule: Schedule) -> Schedule:
    """``schedule`` with all ranks' rounds as they are generated now.

    A generator may go by something that changes later; the rounds that were proved still run.
    """
    rounds = [tuple(schedule.rounds(rank)) for rank in range(schedule.size)]
    return replace(schedule, generate=lambda rank: iter(rounds[rank]))


def digest(schedule: Schedule) -> str:
    """A hash that is equal for equal steps in equal rounds of all ranks."""
    given = (schedule.collective, schedule.root, schedule.chunks, schedule.workspace)
    found = hashlib.sha256(repr((*given, schedule.in_place)).encode())
    for rank in range(schedule.size):
        for steps in schedule.rounds(rank):
            found.update(repr(steps).encode())
        found.update(b"next rank")
    return found.hexdigest()


def register(algorithm: Algorithm) -> Algorithm:
    """Proves ``algorithm`` and everything that it claims on 1 to 9 ranks, and adds it.

    From then on its name is one for ``algorithm=`` of this process; every rank registers its own.
    A number of ranks for which the generator raises :class:`UnknownAlgorithm` is left out.
    Registering an algorithm again, or another that does the same on 1 to 9 ranks, changes nothing.
    Cost: some milliseconds; the proof of a collective with a root is for each root.

    Returns:
        The algorithm.

    Raises:
        ScheduleError: it is wrong, or claims what is not so, as the verifier says.
        UnknownAlgorithm: its name is taken by another, or it is for no number of ranks.
    """
    if not isinstance(algorithm, Algorithm):
        raise UnknownAlgorithm(
            f"register takes an Algorithm, not a {type(algorithm).__name__}: "
            "register(Algorithm('allreduce', 'mine', rounds))"
        )
    collective, name = algorithm.collective, algorithm.name
    contract(collective)
    if any(entry is algorithm for entry in REGISTRY):
        return algorithm
    if not callable(algorithm.rounds or algorithm.compose):
        raise UnknownAlgorithm(f"{collective} {name} needs rounds, a generator function")
    a = algorithm
    flags = (a.keeps_order, a.in_place, a.uneven, a.uniform)
    content = hashlib.sha256(repr((collective, name, flags, a.options)).encode())
    proved = 0
    refused: CollectiveError | None = None
    for size in SIZES:
        try:
            for root in range(size if contract(collective).rooted else 1):
                schedule = kept(guarded(algorithm, size, root))
                prove_claims(algorithm, schedule)
                content.update(digest(schedule).encode())
        except UnknownAlgorithm as error:
            refused = error
            continue
        proved += size > 1
    if refused is not None and not proved:
        raise UnknownAlgorithm(f"{collective} {name} is for none of 2 to 9 ranks: {refused}")
    REGISTRY.add(algorithm, content.hexdigest()[:12])
    return algorithm
