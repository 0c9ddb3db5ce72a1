"""Folders of tokens as nanoGPT prepares them: ``train.bin`` and ``val.bin``, of uint16."""

from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from mpitrain.arrays import Array
from mpitrain.data.dataset import DataError, Dataset
from mpitrain.data.text import Tokens


class _Meta(msgspec.Struct, frozen=True):
    """The used part of ``meta.json``."""

    vocab_size: Annotated[int, msgspec.Meta(ge=1)]


def load_tokens(folder: Path, context: int, vocabulary: int | None = None) -> Dataset:
    """Both files, mapped.

    The vocabulary is by default ``vocab_size`` of a ``meta.json``, else one more than the largest
    token.  A ``meta.pkl`` is not read, as unpickling runs code.

    Raises:
        DataError: a file is missing, has half a token, is too short, or has too large a token.
    """
    source = "data.vocabulary" if vocabulary else "vocab_size of meta.json"
    vocabulary = vocabulary or _vocabulary(folder / "meta.json")
    train, test = (_map(folder / f"{part}.bin") for part in ("train", "val"))
    largest = int(max(train.max(initial=0), test.max(initial=0)))
    if vocabulary is not None and largest >= vocabulary:
        raise DataError(f"{folder} has token {largest}, and {source} is {vocabulary}")
    parts = Tokens(train, context), Tokens(test, context)
    for part, name in zip(parts, ("train.bin", "val.bin")):
        if len(part) < 1:
            raise DataError(
                f"{folder / name} has {len(part.tokens)} tokens, too few for a sample of "
                f"data.context = {context}"
            )
    return Dataset(*parts, vocabulary or largest + 1)


def _vocabulary(path: Path) -> int | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Meta).vocab_size
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise DataError(f"{path} gives no vocabulary: {error}") from error


def _map(path: Path) -> Array:
    try:
        size = path.stat().st_size
        if size % 2:
            raise DataError(f"{path} has {size} bytes, which is no whole number of uint16 tokens")
        if size == 0:
            raise DataError(f"{path} is empty")
        return np.memmap(path, "<u2", mode="r")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
