"""What an algorithm claims, proved; its functions may be wrong in any way."""

import hashlib
from collections import defaultdict

from collectives.algorithms.algorithm import Algorithm
from collectives.analysis.verify import Proof, prove, verify
from collectives.errors import InvalidBuffer, ScheduleError
from collectives.schedule import Copy, Schedule, Send


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
    for claim in ("keeps_order", "uneven"):
        if getattr(algorithm, claim) and not getattr(proof, claim):
            why = {
                "keeps_order": "it does not reduce in rank order",
                "uneven": "it moves blocks to places of other blocks' lengths",
            }[claim]
            raise ScheduleError(f"{schedule} says {claim}=True, and {why}")
    if algorithm.uniform:
        _expect_uniform(schedule)
    return proof


def _expect_uniform(schedule: Schedule) -> None:
    """Every round with messages has as many, as far and as long, on every rank."""
    first: list[tuple[bool, int, int]] = []
    for rank in range(schedule.size):
        for number, steps in enumerate(schedule.rounds(rank)):
            ways = [
                (isinstance(s, Send), (s.peer - rank) % schedule.size, s.chunk.length)
                for s in steps
                if not isinstance(s, Copy)
            ]
            first = first or ways
            if ways and ways != first:
                raise ScheduleError(
                    f"{schedule} says uniform=True, and rank {rank} round {number} is unlike the "
                    "first one"
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


def fingerprint(schedule: Schedule, rank: int) -> str:
    """What identifies the part of ``rank``: equal for equal steps in equal rounds."""
    digest = hashlib.sha256(repr((schedule.chunks, schedule.workspace)).encode())
    digest.update(repr((schedule.collective, schedule.in_place, schedule.root)).encode())
    for steps in schedule.rounds(rank):
        digest.update(repr(steps).encode())
    return digest.hexdigest()


def claims(algorithm: Algorithm) -> str:
    """What it is asked for by, what it says of itself, and its options."""
    a = algorithm
    return repr((a.collective, a.name, a.keeps_order, a.in_place, a.uneven, a.uniform, a.options))
