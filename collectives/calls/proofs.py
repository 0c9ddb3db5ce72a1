"""A program's own algorithms: proved at this number of ranks, and found alike on all of them."""

import logging
from time import perf_counter

from mpi4py import MPI

from collectives.algorithms import find, own, parse
from collectives.analysis.claims import fingerprint, planned, prove_claims
from collectives.calls.agreement import Agreement, names_of
from collectives.errors import CollectiveError, MismatchError, ScheduleError, UnknownAlgorithm
from collectives.schedule import Schedule

log = logging.getLogger("collectives")
#: Seconds of a proof that are worth a warning.
_LONG = 10.0


class Proofs:
    """Those of one communicator.

    Each rank generates its own part of a schedule, and rank 0 all parts: it proves them, and
    compares each with what the rank has.
    """

    def __init__(self, agreement: Agreement) -> None:
        self._agreement = agreement
        self._done: set[tuple[str, str, int]] = set()

    def expect(self, channel: MPI.Intracomm, collective: str, algorithm: str, root: int) -> None:
        """Proves an algorithm of a program's own before its first use.  Collective then.

        Cost: once for each algorithm with its options, and root: a step of Python on rank 0 for
        each step of all ranks, twice in place; 128 ranks of a ring take seconds.

        Raises:
            ScheduleError: on all ranks: it is wrong at this number of ranks.
            MismatchError: on all ranks: they have different algorithms of this name.
            UnknownAlgorithm: on all ranks: it is not for this number of ranks, or options.
        """
        key = (collective, algorithm, root)
        if key in self._done:
            return
        digests = own(collective, algorithm)
        name, options = parse(algorithm)
        in_segments = options.pop("segments", None) is not None
        schedule: Schedule | None = None
        try:
            schedule = planned(find(collective, name), channel.size, root, **options)
            mine = f"{digests} {fingerprint(schedule, channel.rank)}"
            problem = None
        except CollectiveError as error:
            mine, problem = "", error
        told = self._agreement.gathered(channel, (mine, problem and str(problem)))
        verdict: CollectiveError | None = None
        if channel.rank == 0:
            verdict = problem or _differing(schedule, digests, told)
            if verdict is None and schedule is not None:
                verdict = _disproved(collective, name, schedule, in_segments)
        (verdict, *_) = self._agreement.gathered(channel, verdict)
        if verdict is not None:
            raise verdict
        self._done.add(key)


def _differing(
    schedule: Schedule | None, digests: list[str], told: list[tuple[str, str | None]]
) -> CollectiveError | None:
    """What is wrong if a rank has another part than rank 0 has for it."""
    assert schedule is not None, "rank 0 has no problem"
    for rank, (_, problem) in enumerate(told):
        if problem is not None:
            return MismatchError(f"rank {rank}: {problem}; rank 0 has this algorithm")
    others = [
        rank
        for rank, (theirs, _) in enumerate(told)
        if theirs != f"{digests} {fingerprint(schedule, rank)}"
    ]
    if 0 in others:
        return ScheduleError(f"{schedule}: it has other steps each time it is generated")
    if others:
        return MismatchError(
            f"{schedule}: {names_of(others)} registered another algorithm of this name than rank "
            "0; register the same on all ranks"
        )
    return None


def _disproved(
    collective: str, name: str, schedule: Schedule, in_segments: bool
) -> CollectiveError | None:
    """What is wrong with a schedule, or nothing."""
    if in_segments and not schedule.is_aligned:
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
