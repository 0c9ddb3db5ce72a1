"""Reading the samples of the micro-batches that this rank needs, for steps and tests."""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from copy import copy
from itertools import islice, tee
from time import perf_counter
from typing import TYPE_CHECKING

from mpi4py import MPI

from mpitrain.arrays import Array
from mpitrain.data import DataError, Samples
from mpitrain.data.loader import Loader, Request
from mpitrain.fields import described
from mpitrain.ranks.together import together
from mpitrain.training.batches import part
from mpitrain.training.compatibility import expect_values

if TYPE_CHECKING:
    from mpitrain.training.parts import Parts
from mpitrain import extras

#: The samples of micro-batches, by number.
Held = Mapping[int, Samples]


class Feed:
    """Reads batches; each rank reads only the samples it needs.

    An error on one rank is raised on all ranks.

    Attributes:
        read_seconds: seconds of this rank's last read.
        met_seconds: seconds that this rank waited for the other ranks after that read.
    """

    def __init__(self, parts: "Parts") -> None:
        """Start the processes that read ahead; collective; DataError on all ranks if one cannot."""
        comm, data, config, grid = parts.comm, parts.data, parts.config, parts.grid
        self._comm: MPI.Intracomm = comm
        # Ranks may have different numbers of processes; all must agree on whether to synchronise.
        is_ours = isinstance(data.train, Samples) or extras.Tokens.made(data.train)
        may_fail = config.data.workers > 0 or not is_ours
        self._may_fail = comm.allreduce(may_fail, op=MPI.LOR)
        self._first, self._varies = data.train[:1], data.varies
        self._model, self._classes = parts.model, data.classes
        samples = {"train": data.train}
        if data.test is not None:
            samples["test"] = data.test
        reads = parts.partition.needs_samples(grid.place.stage)
        own, most = config.data.workers if reads else 0, config.train.batch_size
        self._loader = together(comm, lambda: Loader(samples, own, most), DataError)
        self.read_seconds = self.met_seconds = 0.0

    def among(self, comm: MPI.Intracomm) -> "Feed":
        """A feed for other ranks with the same processes; close only the first feed."""
        found = copy(self)
        found._comm = comm
        return found

    def batches(
        self, of: str, epoch: int, batches: Iterable[Array], size: int, parts: int,
        own: Callable[[int], Sequence[int]],
    ) -> Generator[tuple[list[Array], Held]]:  # fmt: skip
        """Yields ``size`` batches at a time, with the samples of this rank's micro-batches.

        While the caller works on them, the processes read the next ones.  Collective if reading
        may fail; DataError on all ranks: one cannot read a sample.

        Args:
            of: the part of the data set, ``"train"`` or ``"test"``.
            epoch: number of the epoch; random changes of samples may depend on it.
            batches: sample indices of each batch.
            size: number of batches at a time.
            parts: micro-batches of each batch.
            own: ``own(count)`` gives the numbers of this rank's micro-batches in ``count`` batches.
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
                    expect_values(self._model, self._classes, of, samples, micro_batches[m])
            self.read_seconds = perf_counter() - begun
            return found

        held = together(self._comm, read, DataError) if self._may_fail else read()
        self.met_seconds = perf_counter() - begun - self.read_seconds
        return held

    def _expect_alike(self, samples: Samples) -> None:
        """Raise DataError unless samples are like the first one; collating may vary their sizes."""
        for what in ("inputs", "labels"):
            first, found = getattr(self._first, what), getattr(samples, what)
            one, other = (described(array, varies=self._varies) for array in (found, first))
            if one != other:
                raise DataError(
                    f"{what} are {found.dtype} of shape {found.shape[1:]}, and those of the first "
                    f"sample {first.dtype} of shape {first.shape[1:]}; all must be alike"
                )

    def close(self) -> None:
        """End the processes."""
        self._loader.close()
