"""Runs of a program, alone and on all ranks, and the verdicts on them."""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from importlib.util import find_spec
from typing import Any

import msgspec
from mpi4py import MPI

from collectives.errors import words
from collectives.virtual import copy_own, remembered
from mpitrain.certify.compare import Judgement, judge, limits
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
        self._begin, self._right = remembered(), (Record(), list[dict[str, float]]())
        self._watched: Callable[[Session], Any] = nullcontext
        self.is_double, self._batches, self._eps, self._layouts = True, 1, 0.0, 0
        if sees_torch and find_spec("torch"):
            from mpitrain.certify.scripts import watched

            self._watched = watched

    def refer(self) -> Judgement:
        """Run one process twice, and say whether others can be compared with it."""
        verdict = Judgement("PASS", "", "")
        if self._comm.rank == 0:
            try:
                with _alone():
                    self._right = self._one_process()
            except Exception as error:
                verdict = _refused(error)
        others = MPI.Intracomm(self._comm).Ibarrier()
        while not others.Test():
            time.sleep(0.05)  # another call would keep a core busy
        verdict, self.is_double = self._comm.bcast((verdict, self.is_double))
        return verdict

    def _one_process(self) -> tuple[Record, list[dict[str, float]]]:
        """The whole batch in one process, and the limits of differences from it."""
        own: Tables = {"parallel": msgspec.to_builtins(Parallel())}
        whole: Tables = {**own, "train": {"micro_batches": 1}}
        try:
            found = self._run(whole)
        except Abstained:
            raise
        except Exception:  # some programs have numbers of one type alone
            if not self.is_double:
                raise
            self.is_double = False
            found = self._run(whole)
        if found.has_means:  # over micro-batches, as the layouts take them
            found = self._run(whole := own)
        found.eps = max(found.eps, self._eps)
        return found, limits(found, self._run(whole, moved=found.eps))

    def certify(self, layout: Tables, mutation: str = "") -> Judgement:
        """The verdict on a layout, perhaps with a mistake in it."""
        half = 0 if mutation else self._last // 2
        self._layouts += 1
        try:
            found = self._run(layout, self._layouts, mutation=mutation, save_at=half)
            if layout and not found.is_ours:
                return Judgement(
                    "ERROR", "", "the script has a layout of its own; leave --layouts out"
                )
            verdict = self._judged(found, is_mutated=bool(mutation))
            if verdict.verdict != "PASS" or not (found.is_ours and half):
                return verdict
            again = self._judged(self._run(layout, self._layouts, goes_on=True), half)
        except Exception as error:
            return _refused(error)
        if again.verdict == "PASS":
            return verdict._replace(text=f"{verdict.text}, and again from step {half} on")
        return again._replace(where=f"{again.where} of a run that went on from step {half}")

    def _judged(self, found: Record, first: int = 0, *, is_mutated: bool = False) -> Judgement:
        """The verdict; if need be, beside another reference.

        The other one has the batches of all ranks, or it is moved as far as float32 rounds, as some
        modules compute parts in it.
        """

        def act() -> Judgement:
            return judge(*self._right, found, self._comm.size, first)

        verdict, kept = by_rank_0(self._comm, act, Exception), self._right
        if is_mutated or verdict.verdict == "PASS":
            return verdict
        if verdict.verdict == "FAIL":
            is_new, self._eps = self._eps == 0 and self.is_double, _SINGLE
        else:
            is_new, self._batches = self._batches == 1 and not found.is_ours, self._comm.size
        if is_new and self.refer().verdict == "PASS":
            other = self._judged(found, first)
            if verdict.verdict == "ABSTAIN" or other.verdict != "FAIL":
                return other
            self._right, self._eps = kept, 0.0
        return verdict

    def _run(self, tables: Tables, number: int = 0, **how: Any) -> Record:
        """The record of a run on the ranks of ``MPI.COMM_WORLD``, in a folder by number."""
        run = {"dir": f"{self._folder}/{number}"} | ({"dtype": "float64"} if self.is_double else {})
        session = Session(self._last, {**tables, "run": run}, self.is_double, **how)
        comm = MPI.COMM_WORLD
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


def _refused(error: Exception) -> Judgement:
    """The verdict on a program that cannot be judged, or fails."""
    if isinstance(error, Abstained | DataError):
        return Judgement("ABSTAIN", "", str(error))
    return Judgement("ERROR", "", words(error))
