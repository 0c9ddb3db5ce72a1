"""Digest of a data set, by which ranks and resumed runs compare their data."""

import hashlib
from collections.abc import Iterator

import numpy as np

from mpitrain import extras
from mpitrain.arrays import Array, is_floating
from mpitrain.data.dataset import Dataset
from mpitrain.fields import fields

#: Most numbers of a data set that is read as a whole (MNIST has 47 million).
_ALL = 1 << 26
#: Samples of a larger one, at equal distances, with the first and the last.
_SOME = 1024
#: Samples of a program's own data, which are read one by one.
_FEW = 8
#: Numbers that are read at once.
_AT_ONCE = 1 << 20


def digest(data: Dataset) -> str:
    """Digest of the samples to train and to test on, the same for any ``run.dtype``.

    It covers numbers of samples, shapes and classes, and all samples of up to 67 million numbers;
    else 1024 samples at equal distances, or 8 that are read one by one, a stream's first ones.
    Changes between these are not seen.
    """
    found = hashlib.blake2b(str(data.classes).encode(), digest_size=16)
    parts = (data.train,) if data.test is None else (data.train, data.test)
    for samples in parts:
        first = samples[:1]
        shape = first.inputs.shape[1:], first.labels.shape[1:]
        kinds = first.inputs.dtype.names or first.inputs.dtype.kind
        found.update(f"{len(samples)} {shape} {kinds}".encode())
        size = first.inputs.size + first.labels.size
        most = _FEW if extras.OwnSamples.made(samples) else max(_SOME, _ALL // max(1, size))
        count = min(most, len(samples)) if extras.Streamed.made(samples) else len(samples)
        for which in _parts(count, size, most):
            some = samples[which]
            found.update(_plain(some.inputs))
            found.update(_plain(some.labels))
    return found.hexdigest()


def _parts(count: int, size: int, most: int) -> Iterator[Array]:
    """Indices of ``count`` samples of ``size`` numbers to read, in parts."""
    if count > most:
        which = np.linspace(0, count - 1, min(most, _SOME)).astype(np.int64)
    else:
        which = np.arange(count)
    step = max(1, _AT_ONCE // max(1, size))
    for start in range(0, len(which), step):
        yield which[start : start + step]


def _plain(values: Array) -> bytes:
    """Bytes in a type that does not depend on the job."""
    if values.dtype.names:
        return b"".join(_plain(np.ascontiguousarray(part)) for part in fields(values).values())
    return values.astype("<f4" if is_floating(values.dtype) else "<i8", copy=False).tobytes()
