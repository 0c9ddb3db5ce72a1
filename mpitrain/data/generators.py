"""Generators of random numbers that a program's data draw from: Python's, NumPy's and torch's."""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np


def random_states() -> list[object]:
    """States of Python's, NumPy's and torch's generators."""
    torch: Any = sys.modules.get("torch")
    numpys: Any = np.random.get_state()
    torchs = torch.get_rng_state().numpy().tobytes() if torch else b""
    return [random.getstate(), numpys[1].tobytes(), numpys[2:], torchs]


@contextmanager
def seeded(seed: int, *key: int) -> Iterator[None]:
    """Context in which Python's, NumPy's and torch's generators are seeded by these numbers."""
    with kept_generators():
        seed_generators(seed, *key)
        yield


@contextmanager
def kept_generators() -> Iterator[None]:
    """Context after which Python's, NumPy's and torch's generators are as before."""
    before, numpys = random.getstate(), np.random.get_state()
    torch: Any = sys.modules.get("torch")  # if the program uses it
    torchs = torch.get_rng_state() if torch else None
    try:
        yield
    finally:
        random.setstate(before)
        np.random.set_state(numpys)
        if torch:
            torch.set_rng_state(torchs)


def seed_generators(seed: int, *key: int) -> None:
    """Seeds Python's, NumPy's and torch's generators by these numbers."""
    words = np.random.SeedSequence(seed, spawn_key=key).generate_state(2)
    random.seed(int(words[0]))
    np.random.seed(words)
    if torch := sys.modules.get("torch"):
        torch.default_generator.manual_seed(int(words[0]) << 32 | int(words[1]))


def begin_epoch(data: Any, epoch: int) -> None:
    """Begin an epoch of a DataLoader, a sampler or a data set, and of those in it.

    ``set_epoch`` is called, and generators are seeded, where they have them: each pass is then the
    same in resumed runs and on all ranks.
    """
    torch: Any = sys.modules.get("torch")
    if seed := getattr(getattr(data, "generator", None), "manual_seed", None):
        seed(torch.initial_seed())
    if hasattr(data, "set_epoch"):
        data.set_epoch(epoch)
    for inner in ("sampler", "batch_sampler", "dataset"):
        if (own := getattr(data, inner, None)) is not None and own is not data:
            begin_epoch(own, epoch)
