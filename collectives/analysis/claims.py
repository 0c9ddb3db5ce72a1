"""What an algorithm claims, proved; its functions may be wrong in any way."""

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from itertools import count

from collectives.algorithms.algorithm import Algorithm, Option
from collectives.analysis.verify import Proof, prove, verify
from collectives.contracts import contract
from collectives.errors import CollectiveError, InvalidBuffer, ScheduleError
from collectives.schedule import Copy, Round, Schedule, Send

#: Rounds of a rank, or 100 for each rank if that is more: a generator that yields more never ends.
_MOST_ROUNDS = 10_000


def planned(algorithm: Algorithm, size: int, root: int = 0, **options: Option) -> Schedule:
    """The schedule of an algorithm whose functions may be wrong.

    Raises:
        ScheduleError: a function raised, now or when the rounds are generated, or gave what cannot
            be; or there is no end of rounds.
        UnknownAlgorithm: as the functions raise it, for what they do not do.
    """
    where = f"{algorithm.collective} {algorithm.name} on {size} ranks"
    try:
        schedule = algorithm.schedule(size, root, **options)
    except CollectiveError:
        raise
    except Exception as error:
        raise ScheduleError(f"{where}: {type(error).__name__}: {error}") from error
    for what, least in (("chunks", 1), ("workspace", 0)):
        value = getattr(schedule, what)
        if type(value) is not int or value < least:
            raise ScheduleError(f"{where}: {what} is {value!r}, not a number from {least} on")
    if (schedule.collective, schedule.size) != (algorithm.collective, size):
        raise ScheduleError(f"{where}: compose gave a schedule of {schedule}")
    if contract(schedule.collective).rooted and schedule.root != root:
        raise ScheduleError(f"{where}: compose gave a schedule of root {schedule.root}, not {root}")
    return replace(schedule, generate=lambda rank: _guarded(schedule, rank))


def _guarded(schedule: Schedule, rank: int) -> Iterator[Round]:
    """The rounds of a rank, with errors that say where they are."""
    most = max(_MOST_ROUNDS, 100 * schedule.size)
    rounds: Iterator[Round] | None = None
    for number in count():
        where = f"{schedule}: rank {rank} round {number}"
        try:
            rounds = rounds or iter(schedule.generate(rank))
            steps = next(rounds, None)
        except CollectiveError:
            raise
        except Exception as error:
            raise ScheduleError(f"{where}: {type(error).__name__}: {error}") from error
        if steps is None:
            return
        if number == most:
            raise ScheduleError(f"{where}: the generator has not ended after {most} rounds")
        yield steps


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
                (isinstance(s, Send), (s.peer - rank) % schedule.size, s.chunk.stop - s.chunk.start)
                for s in steps
                if not isinstance(s, Copy)
            ]
            first = first or ways
            if ways and ways != first:
                raise ScheduleError(
                    f"{schedule} says uniform=True, and rank {rank} round {number} is unlike the "
                    "first one"
                )


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
