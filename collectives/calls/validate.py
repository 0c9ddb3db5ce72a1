"""A call as all ranks understand it: read, compared, its own algorithm proved."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from mpi4py import MPI

from collectives.algorithms import Algorithm, names, own, parse
from collectives.analysis.own import is_own, named
from collectives.calls.agreement import Agreement
from collectives.calls.arguments import Arguments
from collectives.calls.buffers import read_buffer
from collectives.calls.call import Call
from collectives.calls.fast_path import is_misread
from collectives.calls.parse_call import expect_able, read_call
from collectives.calls.proofs import Proofs
from collectives.calls.reproducible import is_rounded
from collectives.calls.resources import Resources
from collectives.calls.settings import Settings
from collectives.errors import CollectiveError, InvalidBuffer
from collectives.execution.progress import Underway


class Understanding:
    """Of the calls of one communicator.

    Args:
        comm: the caller's own, as it may be freed: asked then, MPI raises, and a copy would crash.
        underway: the communicator's plans that are under way.
        wait: for a request, while these move along.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        settings: Settings,
        resources: Resources,
        underway: Underway,
        wait: Callable[[MPI.Request], None],
    ) -> None:
        self.comm = comm
        self.settings = settings
        self.resources = resources
        self.underway = underway
        self._wait = wait
        self._agreement = Agreement(wait)
        self._proofs = Proofs(self._agreement)

    def default(self, collective: str) -> str:
        """The communicator's algorithm, where this collective has it."""
        name, _ = parse(self.settings.algorithm)
        known = name in ("auto", "native", *names(collective))
        default = self.settings.algorithm if known else "auto"
        return "native" if collective == "barrier" and default == "auto" else default

    def call(self, arguments: Arguments, algorithm: Algorithm | str, how: str) -> Call:
        """Understands a call, and proves a program's own algorithm before its first use.

        With checking on, all ranks raise if one of them has to, or makes the call in another form,
        which ``how`` says.
        """
        refused: Exception | None = None
        call: Call | None = None
        try:
            arguments = self._with_counts(arguments)
            name = self._named(algorithm, arguments)
            call = self._read(arguments, name)
        except (CollectiveError, TypeError, ValueError, BufferError, MPI.Exception) as error:
            refused = error
        if self.settings.check:
            self.underway.expect_whole()
            lengths = call.lengths if call is not None else {}
            how += ", reproducible" if self.settings.reproducible else ""
            self._agreement.check(self.resources.channel, f"{refused or call}{how}", lengths)
        if call is None:
            assert refused is not None, "a call is understood or refused"
            raise refused
        if own(call.collective, call.algorithm):
            self.underway.expect_whole()
            proved = self._proofs.expect(self.resources.channel, call, algorithm, self._on_one_node)
            call = replace(call, proved=proved)
        expect_able(call)
        return call

    def _read(self, arguments: Arguments, algorithm: str) -> Call:
        """The call, refused before the ranks meet if it cannot be done, so that it can be made
        again."""
        call = read_call(arguments, algorithm, self.comm.rank, self.comm.size)
        if self.settings.reproducible and is_rounded(call):
            call.refuse_overlap()
        return call

    def in_mpi_words(self, arguments: Arguments) -> Arguments:
        """The arguments of the MPI library's own collective, which otherwise reads no call.

        Raises:
            InvalidBuffer: mpi4py would take the items for others than they are.
        """
        reduces = arguments.op is not None
        if not (is_misread(arguments.recvbuf, reduces) or is_misread(arguments.sendbuf, reduces)):
            return arguments
        return read_call(arguments, "native", self.comm.rank, self.comm.size).arguments

    def agree(self, what: str) -> None:
        """With checking on, all ranks raise unless all do the same."""
        if self.settings.check:
            self._agreement.check(self.resources.channel, what, {})

    def _named(self, algorithm: Algorithm | str, arguments: Arguments) -> str:
        """The algorithm's name.  Where a program's own cannot be had, all ranks hear of it, as
        the others may be about to prove it."""
        try:
            return named(algorithm, arguments.collective)
        except CollectiveError as error:
            if is_own(algorithm) and not self.settings.check:
                self.underway.expect_whole()
                self._proofs.refuse(
                    self.resources.channel, arguments, algorithm, self._on_one_node, error
                )
            raise

    @property
    def _on_one_node(self) -> bool:
        return self.resources.node is not None

    def _with_counts(self, arguments: Arguments) -> Arguments:
        """``Reduce_scatter`` without counts: each rank's is what its receive buffer holds."""
        without = arguments.vector and arguments.recvcounts is None and not arguments.is_in_place
        if arguments.collective != "reduce_scatter" or not without:
            return arguments
        self.underway.expect_whole()
        counts = np.full(self.comm.size, -1)
        refused = None
        try:
            counts[self.comm.rank] = read_buffer(arguments.recvbuf, "receive").items.size
        except InvalidBuffer as error:
            refused = error
        self._wait(self.resources.channel.Iallreduce(MPI.IN_PLACE, counts, MPI.MAX))
        if refused is not None:
            raise refused
        if counts.min() < 0:
            raise InvalidBuffer(
                f"reduce_scatter: rank {counts.argmin()} passes a receive buffer that cannot be "
                "used"
            )
        return arguments._replace(recvcounts=counts.tolist())
