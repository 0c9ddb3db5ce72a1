"""Runs of a program, alone and on all ranks, and the verdicts on them."""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from importlib.util import find_spec
from typing import Any, NamedTuple

import msgspec
from mpi4py import MPI

from collectives.errors import words
from collectives.virtual import copy_own, remembered
from mpitrain.certify.compare import LEFT_OUT, Judgement, is_same, judge, limits
from mpitrain.certify.record import HERE, Abstained, Enough, Record, Session
from mpitrain.config import Parallel
from mpitrain.config.unread import defaults_of_readers
from mpitrain.data import DataError
from mpitrain.ranks.together import SharedError, all_or_nobody, by_rank_0

#: Tables of a job, with the keys that a run sets.
Tables = Mapping[str, Mapping[str, Any]]
_ALONE = "COLLECTIVES_ALONE"
#: A record of one process, and how far each tensor may be from it.
_Right = tuple[Record, list[dict[str, float]]]


class _Reference(NamedTuple):
    """One process with so many batches in one, and at least this relative distance of numbers."""

    batches: int = 1
    eps: float = 0.0


@contextmanager
def _alone() -> Iterator[None]:
    """This rank is all ranks."""
    mpi: Any = MPI
    world, usual = mpi.COMM_WORLD, os.environ.get(_ALONE, "0")
    mpi.COMM_WORLD, os.environ[_ALONE] = mpi.COMM_SELF, "1"
    try:
        yield
    finally:
        mpi.COMM_WORLD, os.environ[_ALONE] = world, usual


class Certifier:
    """Runs a program in layouts, beside one process; all methods are collective.

    Attributes:
        is_double: whether torch's numbers, or the job's, are of float64.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        program: Callable[[], None],
        folder: str,
        last: int,
        *,
        sees_torch: bool,
    ) -> None:
        """Nothing runs yet.

        Args:
            comm: all ranks.
            program: trains on the ranks of ``MPI.COMM_WORLD``.
            folder: scratch folder of the runs.
            last: number of the last step.
            sees_torch: whether optimisers of torch are watched, beside the trainer.
        """
        self._comm, self._program, self._folder, self._last = comm, program, folder, last
        self._begin, self._runs = remembered(), dict[_Reference, _Right]()
        self._beside, self._narrow, self._steps = _Reference(), (0.0, ""), 0
        self._watched: Callable[[Session], Any] = nullcontext
        self.is_double, self._layouts, self._latest = True, 0, Record()
        if sees_torch and find_spec("torch"):
            from mpitrain.certify.scripts import watched

            self._watched = watched

    @property
    def numbers(self) -> str:
        """The type in which the program computes, and one that limits what is compared."""
        own = "float64" if self.is_double else "the program's own type"
        return own + f", {self._narrow[1]} in its passes" * any(to.eps for to in self._runs)

    def refer(self, to: _Reference | None = None) -> Judgement:
        """Run one process twice, and say whether others can be compared with it."""
        to, verdict = to or _Reference(), Judgement("PASS", "", "")
        if to in self._runs:
            return verdict
        run: _Right = (Record(), [])
        if self._comm.rank == 0:
            try:
                with _alone():
                    run = self._one_process(to)
            except Exception as error:
                verdict = _refused(error)
        others = MPI.Intracomm(self._comm).Ibarrier()
        while not others.Test():
            time.sleep(0.05)  # another call would keep a core busy
        seen = run[0].narrow if run[0].narrow[0] > run[0].eps else (0.0, "")
        told = verdict, self.is_double, self._narrow if to.eps else seen, len(run[0].steps)
        verdict, *found = self._comm.bcast(told)
        if verdict.verdict == "PASS":
            self.is_double, self._narrow, self._steps = found
            self._runs[to] = run
        return verdict

    def _one_process(self, to: _Reference) -> _Right:
        """The whole batch in one process, and the limits of differences from it."""
        own: Tables = {"parallel": msgspec.to_builtins(Parallel())}
        whole: Tables = {**own, "train": {"micro_batches": 1}}

        def run(tables: Tables, moved: float = 0.0) -> Record:
            return self._run(tables, moved=moved, batches=to.batches)

        try:
            found = run(whole)
        except Abstained:
            raise
        except Exception:  # some programs have numbers of one type alone
            if not self.is_double or self._runs:
                raise
            self.is_double = False
            found = run(whole)
        if found.has_means:  # over micro-batches, as the layouts take them
            found = run(whole := own)
        found.eps = max(found.eps, to.eps)
        return found, limits(found, run(whole, found.eps))

    def certify(self, layout: Tables, mutation: str = "") -> Judgement:
        """The verdict on a layout, perhaps with a mistake in it, which may be none here."""
        half = 0 if mutation else min(self._last, self._steps) // 2
        self._layouts += 1
        place = f"{self._folder}/{self._layouts}"
        if not mutation:
            self._beside = self._beside._replace(eps=0.0)
        try:
            to = {"save_at": half, "save_to": f"{place}-half"}
            found = self._run(layout, place, mutation=mutation, **to)
            if layout and not found.is_ours:
                return Judgement(
                    "ERROR", "", "the script has a layout of its own; leave --layouts out"
                )
            if mutation and by_rank_0(self._comm, lambda: is_same(found, self._latest), Exception):
                return Judgement(LEFT_OUT, "", "it changes nothing here")
            verdict = self._judged(found, is_mutated=bool(mutation))
            self._latest = self._latest if mutation or self._comm.rank else found
            if verdict.verdict != "PASS" or not (found.is_ours and half):
                return verdict
            again = self._judged(self._run(layout, f"{place}-half", goes_on=True), half)
        except Exception as error:
            return _refused(error)
        if again.verdict == "PASS":
            return verdict._replace(text=f"{verdict.text}, and again from step {half} on")
        return again._replace(where=f"{again.where} of a run that went on from step {half}")

    def _judged(self, found: Record, first: int = 0, *, is_mutated: bool = False) -> Judgement:
        """The verdict; if need be, beside another reference."""

        def act() -> Judgement:
            return judge(*self._runs[beside], found, self._comm.size, first)

        beside = self._beside
        verdict = by_rank_0(self._comm, act, Exception)
        if verdict.verdict == "PASS" and beside.eps:
            text = f"{verdict.text}, within what {self._narrow[1]} in its passes allows"
            verdict = verdict._replace(text=text)
        if is_mutated or verdict.verdict == "PASS":
            return verdict
        for other in self._others(verdict, found):
            if self.refer(other).verdict == "PASS":
                self._beside = other
                told = self._judged(found, first)
                if verdict.where.startswith("samples") or told.verdict != "FAIL":
                    return told
                self._beside = beside
        return verdict

    def _others(self, verdict: Judgement, found: Record) -> Iterator[_Reference]:
        """References that may be the right ones: with the batches of all ranks, as far as is known,
        or moved as far as the narrowest type in a pass rounds."""
        is_seen = not verdict.where.startswith("samples") and all(s.samples for s in found.steps)
        if not (is_seen or found.is_ours) and self._beside.batches < self._comm.size:
            yield self._beside._replace(batches=self._comm.size)
        if verdict.verdict == "FAIL" and self._narrow[0] > self._beside.eps:
            yield self._beside._replace(eps=self._narrow[0])

    def _run(self, tables: Tables, folder: str = "", **how: Any) -> Record:
        """The record of a run on the ranks of ``MPI.COMM_WORLD``."""
        run: dict[str, Any] = {"dir": folder or f"{self._folder}/0"}
        if self.is_double:
            run |= {"dtype": "float64", "compute": "same", **defaults_of_readers("run", "compute")}
        session = Session(self._last, {**tables, "run": run}, self.is_double, **how)
        comm = MPI.COMM_WORLD
        self._begin()
        copy_own()
        HERE.session = session
        try:
            with self._watched(session):
                with suppress(Enough), all_or_nobody(comm):
                    self._program()
                for close in session.opened:
                    close()
        except SystemExit as error:
            if error.code:
                raise SharedError(f"the program ended with status {error.code}") from error
        finally:
            HERE.session = None
            self._begin()
        return session.record


def _refused(error: Exception) -> Judgement:
    """The verdict on a program that cannot be judged, or fails."""
    if isinstance(error, Abstained | DataError):
        return Judgement("ABSTAIN", "", str(error))
    return Judgement("ERROR", "", words(error))
