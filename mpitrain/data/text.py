"""Text for language models: pieces of equal length, each token labelled by the next."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from mpitrain.arrays import Array
from mpitrain.data.dataset import DataError, Dataset, Samples


@dataclass(frozen=True)
class Tokens:
    """Samples of ``context`` tokens out of a flat array of integers, which may be a mapped file.

    Sample i begins at token ``i * context``: an epoch predicts every token once, except the first
    and a rest at the end.
    """

    tokens: Array
    context: int

    def __len__(self) -> int:
        return max(0, len(self.tokens) - 1) // self.context

    def __getitem__(self, which: Any) -> Samples:
        """The samples at a slice or an array of indices: inputs and labels (N, context)."""
        first = np.arange(len(self))[which] * self.context
        at = first[:, None] + np.arange(self.context + 1)
        pieces = self.tokens[at].astype(np.int64)
        return Samples(pieces[:, :-1], pieces[:, 1:])


def load_text(
    path: Path, units: Literal["characters", "bytes"], context: int, test_fraction: float
) -> Dataset:
    """The first part of a UTF-8 text to train on, the last to test on; bytes are mapped.

    Raises:
        DataError: the file cannot be read, is not UTF-8, or is too short for one sample of each.
    """
    tokens: Array
    try:
        if units == "characters":
            tokens, vocabulary = characters(path.read_bytes(), str(path))
        else:
            # An empty file cannot be mapped.
            empty = path.stat().st_size == 0
            tokens = np.empty(0, np.uint8) if empty else np.memmap(path, np.uint8, mode="r")
            vocabulary = 256
    except OSError as error:
        raise DataError(f"data.path = {str(path)!r} cannot be read: {error.strerror}") from error
    return split(tokens, vocabulary, context, test_fraction, str(path))


def characters(data: bytes, name: str) -> tuple[Array, int]:
    """Number of each character among the text's sorted characters, and the number of these."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{name} is not UTF-8 at byte {error.start}; data.units = 'bytes' reads anything"
        ) from error
    points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    known, tokens = np.unique(points, return_inverse=True)
    return tokens.astype(np.uint32), len(known)


def split(tokens: Array, vocabulary: int, context: int, test_fraction: float, name: str) -> Dataset:
    """Train on the first tokens, test on the last."""
    middle = len(tokens) - int(len(tokens) * test_fraction)
    train, test = Tokens(tokens[:middle], context), Tokens(tokens[middle:], context)
    if len(train) < 1 or len(test) < 1:
        raise DataError(
            f"{name} has {len(tokens)} tokens: too few for samples of data.context = {context} "
            f"to train and, with data.test_fraction = {test_fraction}, to test on"
        )
    return Dataset(train, test, vocabulary)
