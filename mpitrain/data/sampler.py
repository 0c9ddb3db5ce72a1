"""The order of samples: global batches first, then each rank's share of them."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from collectives.errors import words
from mpitrain import extras
from mpitrain.arrays import Array
from mpitrain.data.dataset import DataError


@dataclass(frozen=True)
class Sampler:
    """Global batches of sample indices, the same for any number of ranks.

    Attributes:
        samples: samples of an epoch; each is in exactly one batch.
        batch_size: samples of a batch; the last one of an epoch has the rest.
        seed: seed of the orders.
        shuffles: whether batches are shuffled; streams keep their order.
        stream: more words of the seed, for other samples with the same seed.
        drop_last: whether a last batch of fewer samples is left out.
    """

    samples: int
    batch_size: int
    seed: int
    shuffles: bool = True
    stream: tuple[int, ...] = ()
    drop_last: bool = False

    @property
    def steps_per_epoch(self) -> int:
        """Batches in an epoch."""
        whole, rest = divmod(self.samples, self.batch_size)
        return whole + (rest > 0 and not self.drop_last)

    @property
    def described(self) -> str:
        """Text that two orders share if they differ in the size of batches alone."""
        return f"{self.samples} samples by seed {self.seed}" if self.shuffles else "in turn"

    def batches(self, epoch: int, seen: int = 0) -> Iterator[Array]:
        """Batches of ``epoch`` behind its first ``seen`` samples, in turn: arrays of indices."""
        order, size = self.order(epoch), self.batch_size
        for first in range(seen, len(order) - self.drop_last * (size - 1), size):
            yield order[first : first + size]

    def order(self, epoch: int) -> Array:
        """Indices of the samples of ``epoch``, in turn."""
        if not self.shuffles:
            return np.arange(self.samples)
        # The epoch as a spawn key: as a second word of entropy, epoch 0 would repeat the stream
        # that the seed alone gives, from which parameters are drawn.
        seeds = np.random.SeedSequence(self.seed, spawn_key=(epoch, *self.stream))
        return np.random.default_rng(seeds).permutation(self.samples)


@dataclass(frozen=True)
class OfWorkers(Sampler):
    """The order in which each worker has samples of its own alone.

    In an epoch a worker takes as many as its part of the batches has: of more than these, others in
    each epoch; of fewer, some several times.

    Attributes:
        own: indices of each worker's samples.
        micro_batches: those of a worker in a batch; the workers' own take turns in it.
    """

    own: Sequence[Array] = ()
    micro_batches: int = 1

    @property
    def described(self) -> str:
        digest = hashlib.blake2b(self.order(0).tobytes(), digest_size=8)
        return f"samples of {len(self.own)} workers of digest {digest.hexdigest()}"

    def order(self, epoch: int) -> Array:
        """See :class:`Sampler`."""
        parts, size = np.arange(len(self.own) * self.micro_batches + 1), self.batch_size
        sizes = [min(size, self.samples - first) for first in range(0, self.samples, size)]
        # Each batch is cut as batches.part() cuts it, and its parts are the workers' by turns.
        ends = [parts * size // parts[-1] for size in sizes]
        whose = np.concatenate([np.repeat(parts[:-1] % len(self.own), np.diff(e)) for e in ends])
        order = np.empty(self.samples, np.int64)
        for worker, own in enumerate(self.own):
            # Three words of spawn key: other streams have one or two.
            seeds = np.random.SeedSequence(self.seed, spawn_key=(epoch, worker, 1))
            drawn = own[np.random.default_rng(seeds).permutation(len(own))]
            order[whose == worker] = np.resize(drawn, int((whose == worker).sum()))
        return order


@dataclass(frozen=True)
class OwnOrder(Sampler):
    """The order of a program's own sampler, or its own batches, lists of indices.

    Python's, NumPy's and torch's generators, and those that the sampler has as ``generator``, are
    seeded by the epoch while it is read, after ``set_epoch(epoch)``, if there is one.

    ``indices``: number of samples of the data set.
    """

    given: Iterable[Any] = ()
    gives_batches: bool = False
    indices: int = 0

    @property
    def steps_per_epoch(self) -> int:
        return len(self.given) if self.gives_batches else super().steps_per_epoch  # type: ignore[arg-type]

    @property
    def described(self) -> str:
        digest = hashlib.blake2b(np.concatenate([*self.batches(0)]).tobytes(), digest_size=8)
        return f"indices of digest {digest.hexdigest()}"

    def batches(self, epoch: int, seen: int = 0) -> Iterator[Array]:
        """See :class:`Sampler`; a batch of which a part was seen is the rest of it.

        Raises:
            DataError: the sampler fails, has another number of batches than its length says, or
                gives what is no index.
        """
        if not self.gives_batches:
            yield from super().batches(epoch, seen)
            return
        found = self._read(epoch)
        if len(found) != self.steps_per_epoch:
            raise self._wrong(
                f"gives {len(found)} batches in epoch {epoch}, and its length is "
                f"{self.steps_per_epoch}; all epochs must have as many"
            )
        for batch in map(self._checked, found):
            if seen < len(batch):
                yield batch[seen:]
            seen = max(0, seen - len(batch))

    def order(self, epoch: int) -> Array:
        order = self._checked(self._read(epoch))
        if len(order) != self.samples:
            raise self._wrong(
                f"gives {len(order)} samples in epoch {epoch}, and its length is {self.samples}; "
                "all epochs must have as many"
            )
        return order

    def expect_one_order(self) -> list[Array]:
        """Check that an epoch has one order, however often it is read.

        Returns:
            The batches of the first epoch, which must be the same on all ranks.

        Raises:
            DataError: it has two, or :meth:`batches` raises it.
        """
        first, again = ([*self.batches(0)] for _ in range(2))
        if joined(first) != joined(again):
            raise self._wrong(
                "gives two orders of one epoch, so that ranks and resumed runs would differ; let "
                "it draw from torch's, NumPy's or Python's own generator, or from one that it has "
                "as generator, or anew after set_epoch(epoch)"
            )
        return first

    def _read(self, epoch: int) -> list[Any]:
        with extras.seeded(self.seed, 2, epoch + 1):
            try:
                extras.begin_epoch(self.given, epoch)
                return list(self.given)
            except (Exception, SystemExit) as error:
                raise self._wrong(f"cannot be read: {words(error)}") from error

    def _checked(self, indices: Any) -> Array:
        found = np.asarray(indices)
        if found.ndim != 1 or not found.size or found.dtype.kind not in "iu":
            raise self._wrong(
                f"gives {indices!r:.60}; {'lists of' if self.gives_batches else ''} whole numbers "
                "are needed"
            )
        if not 0 <= found.min() <= found.max() < self.indices:
            raise self._wrong(f"gives {found.max()}, and there are {self.indices} samples")
        return found.astype(np.int64)

    def _wrong(self, why: str) -> DataError:
        return DataError(f"{type(self.given).__name__} {why}")


def joined(batches: Iterable[Array]) -> bytes:
    """Bytes of indices, in which batches end with -1."""
    return b"".join(np.append(batch, -1).tobytes() for batch in batches)
