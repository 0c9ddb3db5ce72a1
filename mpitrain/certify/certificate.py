"""Runs of a program, alone and on all ranks, and the verdicts on them."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from importlib.util import find_spec
from typing import Any

import msgspec
from mpi4py import MPI

from collectives.errors import words
from collectives.virtual.generators import copy_own, remembered
from mpitrain.certify.compare import Verdict, judge, limits
from mpitrain.certify.record import HERE, Abstained, Enough, Record, Session
from mpitrain.config import Parallel
from mpitrain.data import DataError
from mpitrain.ranks.together import SharedError, all_or_nobody, by_rank_0

#: Tables of a job, with the keys that a run sets.
Tables = Mapping[str, Mapping[str, Any]]
_ALONE = "COLLECTIVES_ALONE"
_SINGLE = 2.0**-23


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
        is_script: bool,
    ) -> None:
        """``program`` trains on ``MPI.COMM_WORLD``, for ``last`` steps; ``folder``: of its runs."""
        self._comm, self._program, self._folder, self._last = comm, program, folder, last
        self._begin, self._right = remembered(), (Record(), list[dict[str, float]]())
        self._watched: Callable[[Session], Any] = nullcontext
        self.is_double, self._batches, self._eps = True, 1, 0.0
        if is_script and find_spec("torch"):
            from mpitrain.certify.scripts import watched

            self._watched = watched

    def refer(self) -> Verdict:
        """Run one process twice, and say whether others can be compared with it."""

        def act() -> bool:
            own: Tables = {"parallel": msgspec.to_builtins(Parallel())}
            whole: Tables = {**own, "train": {"micro_batches": 1}}
            with _alone():
                try:
                    found = self._run(whole)
                except Abstained:
                    raise
                except Exception:  # some programs have numbers of one type alone
                    self.is_double = False
                    found = self._run(whole)
                if found.has_means:  # over micro-batches, as the layouts take them
                    found = self._run(whole := own)
                found.eps = max(found.eps, self._eps)
                moved = self._run(whole, moved=found.eps)
            self._right = found, limits(found, moved)
            return self.is_double

        try:
            self.is_double = by_rank_0(self._comm, act, Exception)
        except Exception as error:
            return _refused(error)
        return Verdict("PASS", "", "")

    def certify(self, layout: Tables, mutation: str = "") -> Verdict:
        """The verdict on a layout, perhaps with a mistake in it."""
        half = self._last // 2
        try:
            found = self._run(layout, mutation=mutation, save_at=half)
            verdict = self._judged(found, is_mutated=bool(mutation))
            if verdict.verdict != "PASS" or mutation or not (found.is_ours and half):
                return verdict
            again = self._judged(self._run(layout, goes_on=True), half)
        except Exception as error:
            return _refused(error)
        if again.verdict == "PASS":
            return verdict._replace(text=f"{verdict.text}, and again from step {half} on")
        return again._replace(where=f"{again.where} of a run that went on from step {half}")

    def _judged(self, found: Record, first: int = 0, *, is_mutated: bool = False) -> Verdict:
        """The verdict, if need be beside a reference with the batches of all ranks, or one that is
        moved as far as float32 rounds, as some modules compute parts in it."""
        kept = self._right, self._batches, self._eps
        ranks, act = self._comm.size, lambda: judge(*self._right, found, self._comm.size, first)
        verdict = by_rank_0(self._comm, act, Exception)
        if is_mutated or found.eps > 1e-9:
            return verdict
        if "ABSTAIN: samples" in f"{verdict.verdict}: {verdict.where}" and self._batches == 1:
            self._batches = ranks
            self.refer()
            verdict = by_rank_0(self._comm, act, Exception)
        if verdict.verdict == "FAIL" and not self._eps:
            self._eps = _SINGLE
            self.refer()
            other = by_rank_0(self._comm, act, Exception)
            if other.verdict == "PASS":
                return other
            self._right, self._batches, self._eps = kept
        return verdict

    def _run(self, tables: Tables, **how: Any) -> Record:
        """The record of a run on the ranks of ``MPI.COMM_WORLD``; its errors are theirs."""
        run = {"dir": self._folder} | ({"dtype": "float64"} if self.is_double else {})
        session, comm = (
            Session(self._last, {**tables, "run": run}, self.is_double, **how),
            MPI.COMM_WORLD,
        )
        session.batches = self._batches if comm.size < self._comm.size else 1
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


def _refused(error: Exception) -> Verdict:
    """The verdict on a program that cannot be judged, or fails."""
    if isinstance(error, Abstained | DataError):
        return Verdict("ABSTAIN", "", str(error))
    return Verdict("ERROR", "", words(error))
