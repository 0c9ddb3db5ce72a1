"""A program's own algorithms: proved at this number of ranks, and found alike on all of them."""

import logging
from collections.abc import Iterable, Iterator
from dataclasses import replace
from time import perf_counter

from mpi4py import MPI

from collectives.algorithms import REGISTRY, Algorithm, find, own, parse
from collectives.algorithms.guard import words
from collectives.analysis.claims import fingerprint, is_aligned, prove_claims
from collectives.calls.agreement import Agreement, names_of
from collectives.calls.arguments import Arguments
from collectives.calls.call import Call
from collectives.errors import CollectiveError, MismatchError, ScheduleError, UnknownAlgorithm
from collectives.schedule import Round, Schedule

log = logging.getLogger("collectives")
#: Seconds of a proof that are worth a warning.
_LONG = 10.0


class Proofs:
    """Those of one communicator.

    Each rank generates its own part of a schedule, and rank 0 all parts: it proves them, and
    compares each with what the rank has.  Where all ranks share a node, each generates all parts,
    as binding in shared memory goes by the others' too.  These parts are kept, so what was proved
    is what runs, whatever the generator does later.
    """

    def __init__(self, agreement: Agreement) -> None:
        self._agreement = agreement
        #: As callers asked, which is the same on all ranks even where one cannot have it.
        self._agreed: set[tuple[str, str, object, bool]] = set()
        self._proved: dict[tuple[str, str, int, bool], Schedule] = {}

    def expect(
        self, channel: MPI.Intracomm, call: Call, asked: Algorithm | str, on_one_node: bool
    ) -> Schedule:
        """The schedule of a program's own algorithm, without segments; it is proved before its
        first use, which is collective.

        Cost: once for each algorithm with its options, and root: a step of Python on rank 0 for
        each step of all ranks, which it keeps, twice in place; 128 ranks of a ring take seconds.

        Args:
            asked: the algorithm as the caller named it.
            on_one_node: whether all ranks share memory.

        Raises:
            ScheduleError: on all ranks: it is wrong at this number of ranks.
            MismatchError: on all ranks: they have different algorithms of this name.
            UnknownAlgorithm: on all ranks: it is not for this number of ranks, or options.
        """
        collective, root = call.collective, call.root
        key = (collective, call.algorithm, root, on_one_node)
        agreed = (collective, str(asked), root, on_one_node)
        if agreed in self._agreed and key in self._proved:
            return self._proved[key]
        schedule = self._proved.get(key)
        if schedule is None:
            schedule = self._proof(channel, call, on_one_node)
        else:  # asked for by another name, which some rank may not know
            told = self._agreement.gathered(channel, ({}, None))
            self._decided(channel, _refused(told) if channel.rank == 0 else None)
        self._proved[key] = schedule
        self._agreed.add(agreed)
        return schedule

    def _proof(self, channel: MPI.Intracomm, call: Call, on_one_node: bool) -> Schedule:
        collective = call.collective
        digests = own(collective, call.algorithm)
        name, options = parse(call.algorithm)
        in_segments = options.pop("segments", None) is not None
        everybody = range(channel.size)
        parts = everybody if on_one_node else [channel.rank]
        schedule: Schedule | None = None
        try:
            schedule = REGISTRY.schedule(collective, name, channel.size, call.root, **options)
            # Rank 0 keeps what it proves: the next generation may be another one.
            kept = everybody if channel.rank == 0 else parts
            schedule = _kept(schedule, kept, channel.rank)
            mine = {part: f"{digests} {fingerprint(schedule, part)}" for part in parts}
            problem = None
        except CollectiveError as error:
            mine, problem = {}, error
        except Exception as error:  # of what the steps are made of
            mine, problem = {}, ScheduleError(f"{collective} {name}: {words(error)}")
        told = self._agreement.gathered(channel, (mine, problem and str(problem)))
        verdict: CollectiveError | None = None
        aligned = False
        if channel.rank == 0:
            verdict = problem or _differing(schedule, digests, told)
            if verdict is None and schedule is not None:
                aligned = is_aligned(schedule)
                verdict = _disproved(collective, name, schedule, in_segments and not aligned)
        aligned = self._decided(channel, verdict, aligned)
        assert schedule is not None, "rank 0 has found no problem on any rank"
        return replace(schedule, aligned=aligned)

    def refuse(
        self,
        channel: MPI.Intracomm,
        arguments: Arguments,
        asked: Algorithm | str,
        on_one_node: bool,
        problem: CollectiveError,
    ) -> None:
        """Tells the other ranks, which may be about to prove it, that this one cannot have the
        algorithm that was ``asked`` for.  Collective where they are.

        Raises:
            MismatchError: on all ranks, if others have it.
        """
        if (arguments.collective, str(asked), arguments.root, on_one_node) in self._agreed:
            return
        self._agreement.gathered(channel, ({}, str(problem)))
        self._decided(channel, problem if channel.rank == 0 else None)

    def _decided(
        self, channel: MPI.Intracomm, verdict: CollectiveError | None, aligned: bool = False
    ) -> bool:
        """Whether the schedule is aligned, as rank 0 finds; or its verdict, on all ranks.

        A program's own class of errors may be unknown there: the error is of that one of ours which
        the class inherits from.
        """
        mine = verdict and (_ours(type(verdict)), str(verdict))
        ((told, aligned), *_) = self._agreement.gathered(channel, (mine, aligned))
        if told is not None:
            kind, text = told
            raise kind(text)
        return aligned


def _ours(error: type[CollectiveError]) -> type[CollectiveError]:
    return next(kind for kind in error.__mro__ if kind.__module__ == CollectiveError.__module__)


def _kept(schedule: Schedule, ranks: Iterable[int], mine: int) -> Schedule:
    """``schedule`` with the rounds of ``ranks`` as they are now.

    Raises:
        ScheduleError: those of ``mine`` are others when they are generated again.
    """
    if tuple(schedule.rounds(mine)) != tuple(schedule.rounds(mine)):
        raise ScheduleError(f"{schedule}: it has other steps each time it is generated")
    kept = {rank: tuple(schedule.rounds(rank)) for rank in ranks}

    def generate(rank: int) -> Iterator[Round]:
        return iter(kept[rank]) if rank in kept else schedule.generate(rank)

    return replace(schedule, generate=generate)


def _refused(told: list[tuple[dict[int, str], str | None]]) -> CollectiveError | None:
    """What is wrong if a rank cannot have the algorithm."""
    for rank, (_, problem) in enumerate(told):
        if problem is not None:
            return MismatchError(f"rank {rank}: {problem}; rank 0 has this algorithm")
    return None


def _differing(
    schedule: Schedule | None,
    digests: list[str],
    told: list[tuple[dict[int, str], str | None]],
) -> CollectiveError | None:
    """What is wrong if a rank has another part than rank 0 has for it."""
    assert schedule is not None, "rank 0 has no problem"
    if refused := _refused(told):
        return refused
    named = {part for parts, _ in told for part in parts}
    right = {part: f"{digests} {fingerprint(schedule, part)}" for part in named}
    others = [
        rank
        for rank, (parts, _) in enumerate(told)
        if any(right[part] != theirs for part, theirs in parts.items())
    ]
    if others:
        return MismatchError(
            f"{schedule}: {names_of(others)} registered another algorithm of this name than rank "
            "0; register the same on all ranks"
        )
    return None


def _disproved(
    collective: str, name: str, schedule: Schedule, segments_fail: bool
) -> CollectiveError | None:
    """What is wrong with a schedule, or nothing."""
    if segments_fail:
        return UnknownAlgorithm(
            f"{schedule}: no segments, as some messages leave in a round of another number than "
            "they arrive in; let ranks that have nothing to do yield empty rounds until then"
        )
    begun = perf_counter()
    try:
        prove_claims(find(collective, name), schedule)
    except CollectiveError as error:
        return error
    seconds = perf_counter() - begun
    level = logging.WARNING if seconds > _LONG else logging.INFO
    log.log(level, "%s: proved in %.1f s, once for this communicator", schedule, seconds)
    return None
