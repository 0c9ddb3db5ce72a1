"""Proof that ranks, or a run and the one that it goes on from, have the same data."""

import hashlib

import numpy as np

from mpitrain.data.dataset import Dataset, Indexed
from mpitrain.nn import Array

#: Samples are read whole up to so many bytes of them, ...
_ALL_BYTES = 1 << 24
#: ... and of more, so many at equal distances, the first and the last among them.
_SOME = 1024


def digest(data: Dataset) -> str:
    """Digest of the samples to train and to test on, the same for any ``run.dtype``.

    Numbers, shapes and classes are in it, and all samples of up to 16 MiB; of more, 1024 at equal
    distances, so that a change between these is not seen.  Reads as much at most.
    """
    found = hashlib.blake2b(str(data.classes).encode(), digest_size=16)
    for samples in (data.train, data.test):
        some = samples[_which(samples)]
        for values in (some.inputs, some.labels):
            plain = _plain(values)
            found.update(f"{len(samples)} {plain.shape} {plain.dtype}".encode())
            found.update(plain.tobytes())
    return found.hexdigest()


def _which(samples: Indexed) -> Array:
    """The numbers of the samples that are read."""
    count = len(samples)
    first = samples[:1]
    if count * (first.inputs.nbytes + first.labels.nbytes) > _ALL_BYTES and count > _SOME:
        return np.linspace(0, count - 1, _SOME).astype(np.int64)
    return np.arange(count)


def _plain(values: Array) -> Array:
    """Of a type that the job has no part in."""
    return values.astype("<f4" if values.dtype.kind == "f" else "<i8", copy=False)
