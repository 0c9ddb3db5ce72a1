"""Parses a call, compares it across the ranks, and has a program's own algorithm proved."""

import logging
from collections.abc import Hashable, Mapping
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import numpy as np
from mpi4py import MPI

from collectives import extras
from collectives.algorithms import REGISTRY, Algorithm, find, names, own, parse, resolve
from collectives.calls.arguments import Arguments
from collectives.calls.buffers import read_buffer
from collectives.calls.call import Call
from collectives.calls.fast_path import DTYPES, is_misread
from collectives.calls.parse_call import expect_able, parse_call
from collectives.calls.resources import Resources
from collectives.contracts import Member, contract
from collectives.errors import (
    CollectiveError,
    InvalidBuffer,
    MismatchError,
    ScheduleError,
    UnknownAlgorithm,
    by_ranks,
    words,
)
from collectives.schedule import Schedule

log = logging.getLogger("collectives")
#: Seconds of a proof that are worth a warning.
_LONG = 10.0


class Validator:
    """Validates the calls of one communicator.

    Args:
        comm: the caller's own.  It may be freed: MPI raises then, where a copy would crash.
    """

    def __init__(self, comm: MPI.Intracomm, resources: Resources) -> None:
        self.comm = comm
        self.settings = resources.settings
        self.resources = resources
        self.progress = resources.progress
        self._compared = 0
        self._proofs = Proofs(resources)

    def default(self, collective: str) -> str:
        """The communicator's algorithm, where this collective has it."""
        name, _ = parse(self.settings.algorithm)
        known = name in ("auto", "native", *names(collective))
        default = self.settings.algorithm if known else "auto"
        return "native" if collective == "barrier" and default == "auto" else default

    def call(self, arguments: Arguments, algorithm: Algorithm | str, form: str) -> Call:
        """The parsed call; a program's own algorithm is proved before its first use.

        With ``check``, all ranks raise if one of them has to, or makes the call in another
        ``form``.
        """
        refused: Exception | None = None
        call = None
        try:
            arguments = self._with_counts(arguments)
            name = self._named(algorithm, arguments)
            call = parse_call(arguments, name, self.comm.rank, self.comm.size)
            # Refused before the ranks meet if it cannot be done, so that it can be made again.
            if self.settings.reproducible and extras.is_rounded(call):
                call.refuse_overlap()
        except (CollectiveError, TypeError, ValueError, BufferError, MPI.Exception) as error:
            refused = error
        if self.settings.check:
            lengths = {} if refused or call is None else call.lengths
            form += ", reproducible" if self.settings.reproducible else ""
            self._expect_alike(f"{refused or call}{form}", lengths)
        if refused is not None:
            raise refused
        assert call is not None, "a call is parsed or refused"
        if own(call.collective, call.algorithm):
            self.progress.expect_whole()
            call = replace(call, proved=self._proofs.schedule(call, algorithm))
        expect_able(call)
        return call

    def for_native(self, arguments: Arguments) -> Arguments:
        """The arguments of the MPI library's own collective, which is not parsed otherwise.

        Raises:
            InvalidBuffer: mpi4py would take the items for others than they are.
        """
        sent, received, reduces = arguments.sendbuf, arguments.recvbuf, arguments.op is not None
        if type(received) is np.ndarray and received.dtype in DTYPES:  # the usual case
            alike = type(sent) is np.ndarray and sent.dtype is received.dtype
            if alike or sent is MPI.IN_PLACE:
                return arguments
        if not (is_misread(received, reduces) or is_misread(sent, reduces)):
            return arguments
        return parse_call(arguments, "native", self.comm.rank, self.comm.size).arguments

    def least_bytes(self, arguments: Arguments) -> int:
        """:attr:`Call.least_bytes` of a call that the MPI library carries out; 0 if it is not of a
        plain array and equal blocks, as others would have to be parsed."""
        received, size = arguments.recvbuf, self.comm.size
        own = contract(arguments.collective)
        if type(received) is not np.ndarray or arguments.vector or own.rooted:
            return 0
        parts = own.recv_blocks(Member(self.comm.rank, size))
        return own.least_bytes(size, received.nbytes // parts * own.blocks(size))

    def agree(self, what: str) -> None:
        """With ``check``, all ranks raise unless all do the same."""
        if self.settings.check:
            self._expect_alike(what, {})

    def _named(self, algorithm: Algorithm | str, arguments: Arguments) -> str:
        """The algorithm's name.  If a program's own cannot be had, all ranks hear of it, as the
        others may be about to prove it."""
        try:
            return resolve(algorithm, arguments.collective)
        except CollectiveError as error:
            if extras.is_own(algorithm) and not self.settings.check:
                self.progress.expect_whole()
                self._proofs.refuse(arguments, algorithm, error)
            raise

    def _with_counts(self, arguments: Arguments) -> Arguments:
        """``Reduce_scatter`` without counts: each rank's is what its receive buffer holds."""
        without = arguments.vector and arguments.recvcounts is None and not arguments.is_in_place
        if arguments.collective != "reduce_scatter" or not without:
            return arguments
        self.progress.expect_whole()
        counts = np.full(self.comm.size, -1)
        refused = None
        try:
            counts[self.comm.rank] = read_buffer(arguments.recvbuf, "receive").items.size
        except InvalidBuffer as error:
            refused = error
        self.resources.wait(self.resources.channel.Iallreduce(MPI.IN_PLACE, counts, MPI.MAX))
        if refused is not None:
            raise refused
        if counts.min() < 0:
            raise InvalidBuffer(
                f"reduce_scatter: rank {counts.argmin()} passes a receive buffer that cannot be "
                "used"
            )
        return arguments._replace(recvcounts=counts.tolist())

    def _expect_alike(self, call: str, lengths: Mapping[Hashable, int]) -> None:
        """Compares a call across the ranks; collective.

        Cost: an all-gather of 8 bytes a rank, and one of some 200; for a v-variant, of its counts,
        too.

        Args:
            call: the call in words that are the same on all ranks.
            lengths: bytes of blocks by name; ranks that know a block must know the same length.

        Raises:
            MismatchError: on all ranks, unless they all make the same call.
        """
        self.progress.expect_whole()
        self._compared += 1
        code, line = extras.call_site()
        site = f"{Path(code.co_filename).name}:{line}" if code else "unknown place"
        everybody = self.resources.gathered((call, site, dict(lengths)))
        places: dict[str, str] = {}
        for other, place, _ in everybody:
            places.setdefault(other, place)
        where = f"(number {self._compared} of this communicator)"
        if len(places) > 1:
            calls = by_ranks([f"{other} (at {places[other]})" for other, _, _ in everybody])
            raise MismatchError(f"the ranks' calls do not belong together {where}: {calls}")
        known: dict[Hashable, tuple[int, int]] = {}
        for rank, (_, place, told) in enumerate(everybody):
            for block, nbytes in told.items():
                first, length = known.setdefault(block, (rank, nbytes))
                if length != nbytes:
                    ranks_of = block if isinstance(block, tuple) else (block,)
                    name = " for ".join(f"rank {r}" for r in ranks_of)
                    raise MismatchError(
                        f"the ranks' counts do not belong together {where}: {call}: rank {first} "
                        f"(at {everybody[first][1]}) has {length} bytes where rank {rank} (at "
                        f"{place}) has {nbytes}: the block of {name}"
                    )


class Proofs:
    """The proofs of one communicator.

    Each rank generates the parts of all ranks, proves them and keeps them, and the ranks compare
    their digests.  So what was proved is what runs, whatever a generator does later.
    """

    def __init__(self, resources: Resources) -> None:
        self._resources = resources
        #: As callers asked, which is the same on all ranks even where one cannot have it.
        self._agreed: set[tuple[str, str, object]] = set()
        self._proved: dict[tuple[str, str, int], Schedule] = {}

    def schedule(self, call: Call, asked: Algorithm | str) -> Schedule:
        """The schedule of a program's own algorithm, without segments; it is proved before its
        first use, which is collective.

        Cost: once for each algorithm with its options, and root: a step of Python on each rank for
        each step of all ranks, twice in place; 128 ranks of a ring take seconds.

        Args:
            asked: the algorithm as the caller named it.

        Raises:
            ScheduleError: on all ranks: it is wrong at this number of ranks.
            MismatchError: on all ranks: they have different algorithms of this name.
            UnknownAlgorithm: on all ranks: it is not for this number of ranks, or options.
        """
        key = (call.collective, call.algorithm, call.root)
        agreed = (call.collective, str(asked), call.root)
        schedule, found, problem = self._proved.get(key), "", None
        if schedule is not None and agreed in self._agreed:
            return schedule
        if schedule is None:
            try:
                schedule = _proved(call)
                found = f"{own(call.collective, call.algorithm)} {extras.digest(schedule)}"
            except CollectiveError as error:
                problem = error
            except Exception as error:  # parts of steps may raise anything
                problem = ScheduleError(f"{call.collective} {call.algorithm}: {words(error)}")
        self._agree(call.algorithm, found, problem)
        assert schedule is not None, "no rank has a problem"
        # Shared memory needs the parts of all ranks.
        if found and self._resources.ranks_per_node < call.member.size:
            mine = tuple(schedule.rounds(call.member.rank))
            schedule = replace(schedule, generate=lambda rank: iter(mine))
        self._proved[key] = schedule
        self._agreed.add(agreed)
        return schedule

    def refuse(
        self, arguments: Arguments, asked: Algorithm | str, problem: CollectiveError
    ) -> None:
        """Tells the other ranks, which may be about to prove it, that this one cannot have the
        algorithm that was ``asked`` for.  Collective where they are.

        Raises:
            MismatchError: on all ranks, if others have it.
        """
        if (arguments.collective, str(asked), arguments.root) not in self._agreed:
            self._agree(str(asked), "", problem)

    def _agree(self, name: str, found: str, problem: CollectiveError | None) -> None:
        """Raises on all ranks if one has a problem, or has found another algorithm than rank 0.

        Another rank may not know a program's own class of errors: the error is of that one of ours
        which the class inherits from.
        """
        mine, ours = None, CollectiveError.__module__
        if problem is not None:
            kind = next(kind for kind in type(problem).__mro__ if kind.__module__ == ours)
            mine = kind, str(problem)
        told = self._resources.gathered((found, mine))
        for rank, (_, other) in enumerate(told):
            if other is not None and rank == 0:
                kind, text = other
                raise kind(text)
            if other is not None:
                raise MismatchError(f"rank {rank}: {other[1]}; rank 0 has this algorithm")
        others = [str(rank) for rank, (digest, _) in enumerate(told) if digest != told[0][0]]
        if others:
            raise MismatchError(
                f"{name}: ranks {', '.join(others)} registered another algorithm of this name than "
                "rank 0; register the same on all ranks"
            )


def _proved(call: Call) -> Schedule:
    """The schedule of all ranks, as it is generated now and proved.

    Raises:
        CollectiveError: it is wrong.
    """
    collective, size = call.collective, call.member.size
    name, options = parse(call.algorithm)
    in_segments = options.pop("segments", None) is not None
    schedule = extras.kept(REGISTRY.schedule(collective, name, size, call.root, **options))
    schedule = replace(schedule, aligned=extras.is_aligned(schedule))
    if in_segments and not schedule.aligned:
        raise UnknownAlgorithm(
            f"{schedule}: no segments, as some messages leave in a round of another number than "
            "they arrive in; let ranks that have nothing to do yield empty rounds until then"
        )
    begun = perf_counter()
    extras.prove_claims(find(collective, name), schedule)
    seconds = perf_counter() - begun
    level = logging.WARNING if seconds > _LONG else logging.INFO
    log.log(level, "%s: proved in %.1f s, once for this communicator", schedule, seconds)
    return schedule
