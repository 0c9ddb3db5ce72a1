"""A program's DataLoader, taken apart: the trainer reads its data set, in its order."""

import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from collectives.errors import words
from mpitrain.config import Data as DataTable
from mpitrain.config import Train
from mpitrain.data.dataset import DataError
from mpitrain.data.map_style import Collate, OwnSamples
from mpitrain.data.sampler import OwnOrder, Sampler
from mpitrain.data.stream import Stream, Streamed, is_stream

log = logging.getLogger("mpitrain")


@dataclass(frozen=True)
class Taken:
    """Data of a program, and how they are read.

    Attributes:
        data: samples by number or in turn.
        collate: makes a batch of samples that need not be alike; None: they are stacked.
        batch_size: samples of a global batch; 0: not said.
        shuffles: whether samples are shuffled.
        drop_last: whether a last batch of fewer samples is left out.
        order: a sampler of the program's own; None: the trainer's order.
        gives_batches: whether ``order`` gives lists of indices.
        workers: number of processes that read ahead; 0: not said.
    """

    data: Any
    collate: Collate | None = None
    batch_size: int = 0
    shuffles: bool = True
    drop_last: bool = False
    order: Any = None
    gives_batches: bool = False
    workers: int = 0

    def samples(self, dtype: DTypeLike, seed: int) -> OwnSamples:
        """The samples, with numbers of this type."""
        kind = Streamed if is_stream(self.data) else OwnSamples
        return kind(self.data, dtype, seed, collate=self.collate)

    def tested(self) -> "Taken":
        """These data for tests, which take all samples, or all those of ``order``."""
        if self.drop_last:
            log.warning("test_data: tests take all samples, also those that drop_last leaves out")
        if self.order is None:
            return self
        whole = replace(self, drop_last=False).sampler(len(self.data), max(1, self.batch_size), 0)
        chosen = np.sort(np.concatenate(list(whole.batches(0))))
        data = sys.modules["torch"].utils.data.Subset(self.data, chosen.tolist())
        return Taken(data, self.collate)

    def sampler(self, samples: int, batch_size: int, seed: int) -> Sampler:
        """The order of this number of samples."""
        if self.order is None:
            return Sampler(
                samples, batch_size, seed, shuffles=self.shuffles, drop_last=self.drop_last
            )
        return OwnOrder(
            samples if self.gives_batches else len(self.order),
            batch_size,
            seed,
            drop_last=self.drop_last,
            given=self.order,
            gives_batches=self.gives_batches,
            indices=samples,
        )


def taken(what: str, data: Any, collate: Collate | None = None) -> Taken:
    """Take a DataLoader of torch that gives batches apart; other data are as they are.

    ``collate`` makes batches of data that are no DataLoader; ``what`` names the data in errors.

    Raises:
        DataError: the order of a DataLoader cannot be taken over.
    """
    loader: Any = data.source if isinstance(data, Stream) else data
    batches = getattr(loader, "batch_sampler", None)
    if batches is None or not hasattr(loader, "dataset"):
        alone = getattr(loader, "batch_size", 0) is None  # each item is a step, as in torch
        return Taken(data, collate, shuffles=not is_stream(data), batch_size=int(alone))
    if collate is not None:
        raise DataError(f"{what} is a DataLoader, which has a collate_fn; give collate_fn there")
    utils: Any = sys.modules["torch"].utils.data
    # A subclass may change batches in either of these.
    for name in ("__iter__", "_get_iterator"):
        if getattr(type(loader), name, None) is not getattr(utils.DataLoader, name):
            raise DataError(
                f"{what}: {type(loader).__name__} has its own {name}(), which the trainer does not "
                "call, as it reads the data set itself; give a DataLoader of torch, and change "
                "samples in the data set or in collate_fn"
            )
    own, dataset = loader.collate_fn, loader.dataset
    found: dict[str, Any] = {
        "data": dataset,
        "collate": None if own is utils.default_collate else own,
        "batch_size": loader.batch_size or 0,
        "drop_last": bool(loader.drop_last),
        "workers": loader.num_workers,
    }
    if is_stream(dataset):
        if loader is not data:
            starting_at = getattr(data, "starting_at", None)
            found["data"] = Stream(dataset, len(data), starting_at=starting_at)
        found["workers"] = min(1, loader.num_workers)
        return Taken(**found | {"shuffles": False})
    if loader is not data:
        raise DataError(
            f"{what}: a Stream of a DataLoader over {type(dataset).__name__}, which has samples by "
            "number; give the DataLoader itself"
        )
    if type(batches) is not utils.BatchSampler:
        return Taken(**found | _own_batches(what, batches, len(dataset)))
    # A DataLoader that was given its batch sampler says neither of these.
    found |= {"batch_size": batches.batch_size, "drop_last": batches.drop_last}
    return Taken(**found | _order(what, batches, dataset, utils))


def _order(what: str, batches: Any, dataset: Any, utils: Any) -> dict[str, Any]:
    """The order of torch's own samplers over the whole data set; others give theirs."""
    sampler, kind = batches.sampler, type(batches.sampler)
    source: Any = getattr(sampler, "data_source", getattr(sampler, "dataset", None))
    known = (utils.DistributedSampler, utils.SequentialSampler, utils.RandomSampler)
    if kind in known and (source is dataset or len(source) == len(dataset)):
        if kind is utils.DistributedSampler:  # it has the share of a rank
            whole = batches.batch_size * sampler.num_replicas
            log.info("%s: its DistributedSampler is left out, and batches are of %d", what, whole)
            return {"batch_size": whole, "shuffles": sampler.shuffle}
        if kind is utils.SequentialSampler:
            return {"shuffles": False}
        plain = kind is utils.RandomSampler and not sampler.replacement
        if plain and sampler.num_samples == len(source):
            return {"shuffles": True}
    _expect_undivided(what, sampler)
    _length(what, sampler)
    return {"order": sampler}


def _own_batches(what: str, batches: Any, samples: int) -> dict[str, Any]:
    for one in (batches, getattr(batches, "sampler", None)):
        _expect_undivided(what, one)
    _length(what, batches)
    order = OwnOrder(samples, 1, 0, given=batches, gives_batches=True, indices=samples)
    most = max(map(len, order.batches(0)))
    return {"order": batches, "gives_batches": True, "drop_last": False, "batch_size": most}


def _length(what: str, sampler: Any) -> None:
    try:
        length = len(sampler)
    except Exception as error:  # whatever a program's own function raises
        raise DataError(
            f"{what}: {type(sampler).__name__} has no length, from which epochs, rates and resumed "
            f"runs follow ({words(error)}); give it __len__"
        ) from error
    if not length:
        raise DataError(f"{what}: {type(sampler).__name__} is empty; let it give samples")


def _expect_undivided(what: str, sampler: Any) -> None:
    if getattr(sampler, "num_replicas", 1) not in (None, 1):
        raise DataError(
            f"{what}: {type(sampler).__name__} gives the samples of one rank among "
            f"{sampler.num_replicas}, and the trainer divides each batch among the ranks itself; "
            "make it with num_replicas=1, rank=0"
        )


def settings(
    found: Taken, asked: Mapping[str, Any], train: Train, data: DataTable
) -> dict[str, Any]:
    """The settings of a job that a DataLoader says and the program, by ``asked``, does not.

    Raises:
        DataError: the program gives another size of batches.
    """
    own: dict[str, Any] = {}
    is_asked = "batch_size" in {**asked.get("train", {}), **asked}
    is_asked = is_asked or train.batch_size != Train().batch_size
    if not is_asked and found.batch_size:
        own["batch_size"] = found.batch_size
    # torch's size is 1 where a program says none.
    elif found.batch_size > 1 and found.batch_size != train.batch_size:
        raise DataError(
            f"train_data is a DataLoader with batches of {found.batch_size} samples, over all "
            f"ranks, and train.batch_size = {train.batch_size}; leave one of them out"
        )
    if found.workers and not data.workers:
        own["workers"] = found.workers
    return own
