"""Reads the samples of the micro-batches that this rank needs, for steps and tests."""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from copy import copy
from itertools import islice, tee
from time import perf_counter

from mpi4py import MPI

from mpitrain.arrays import Array
from mpitrain.data import DataError, Dataset, Samples
from mpitrain.data.loader import Loader, Request
from mpitrain.data.own import OwnSamples
from mpitrain.ranks.together import together
from mpitrain.training.batches import part

#: The samples of micro-batches, by number.
Held = Mapping[int, Samples]


class Feed:
    """Reads batches, each rank what it needs of them alone; an error of one is one of all.

    Attributes:
        read_seconds: seconds of this rank's last read.
        met_seconds: seconds of waiting for the other ranks afterwards.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        data: Dataset,
        *,
        workers: int,
        most: int,
        reads: bool,
        expect: Callable[[str, Samples, Array], None],
    ) -> None:
        """Start the processes that read ahead; collective.

        Args:
            comm: all ranks.
            data: the data set.
            workers: processes of each rank.
            most: samples of the largest micro-batch.
            reads: whether this rank needs any sample.
            expect: raises DataError of samples, by part of the data set and numbers, that cannot
                be trained on; asked where they are read one by one.

        Raises:
            DataError: on all ranks; one of them cannot start them.
        """
        self._comm = comm
        # Alike on all ranks, which may have different numbers of processes.
        self._may_fail = comm.allreduce(
            workers > 0 or isinstance(data.train, OwnSamples), op=MPI.LOR
        )
        self._first = data.train[:1]
        self._expect = expect
        parts = {"train": data.train}
        if data.test is not None:
            parts["test"] = data.test
        own = workers if reads else 0
        self._loader = together(comm, lambda: Loader(parts, own, most), DataError)
        self.read_seconds = self.met_seconds = 0.0

    def among(self, comm: MPI.Intracomm) -> "Feed":
        """A feed with the same processes, for other ranks; close the first one only."""
        found = copy(self)
        found._comm = comm
        return found

    def batches(
        self,
        of: str,
        epoch: int,
        batches: Iterable[Array],
        size: int,
        parts: int,
        own: Callable[[int], Sequence[int]],
    ) -> Generator[tuple[list[Array], Held]]:
        """Some batches at a time, with the samples of those of their micro-batches that are ours.

        While they are worked on, the processes read those that follow.  Collective where reading
        may fail.

        Args:
            of: the part of the data set, ``"train"`` or ``"test"``.
            epoch: as which they are read.
            batches: sample indices.
            size: batches at a time.
            parts: micro-batches of each batch.
            own: numbers of our micro-batches among those of so many batches.

        Raises:
            DataError: on all ranks; one of them cannot read a sample.
        """
        rest = iter(batches)
        some, those = tee(iter(lambda: list(islice(rest, size)), []))
        requests = (
            Request(of, epoch, part(window, parts, m)) for window in some for m in own(len(window))
        )
        with closing(self._loader.read(requests)) as reading:
            for window in those:
                ours = {m: part(window, parts, m) for m in own(len(window))}
                yield window, self._held(reading, of, ours)

    def _held(
        self, reading: Iterator[Samples], of: str, micro_batches: Mapping[int, Array]
    ) -> Held:
        begun = perf_counter()

        def read() -> Held:
            found = {m: next(reading) for m in micro_batches}
            for m, samples in found.items():
                self._expect_alike(samples)
                if self._may_fail:
                    self._expect(of, samples, micro_batches[m])
            self.read_seconds = perf_counter() - begun
            return found

        held = together(self._comm, read, DataError) if self._may_fail else read()
        self.met_seconds = perf_counter() - begun - self.read_seconds
        return held

    def _expect_alike(self, samples: Samples) -> None:
        """Messages and losses count on it."""
        for what in ("inputs", "labels"):
            first, found = getattr(self._first, what), getattr(samples, what)
            if (found.dtype, found.shape[1:]) != (first.dtype, first.shape[1:]):
                raise DataError(
                    f"{what} are {found.dtype} of shape {found.shape[1:]}, and those of the first "
                    f"sample {first.dtype} of {first.shape[1:]}; all must be alike"
                )

    def close(self) -> None:
        """End the processes."""
        self._loader.close()
