"""Random numbers that are the same on all ranks: they depend on a seed and words alone."""

from hashlib import blake2b

import numpy as np


def seed_of(*words: int | str) -> int:
    """Seed of 64 bits from words such as the run's seed, a step and a tensor's name."""
    text = "\0".join(f"{type(word).__name__} {word}" for word in words)
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def generator(*words: int | str) -> np.random.Generator:
    """Generator that is seeded by these words."""
    return np.random.Generator(np.random.Philox(key=seed_of(*words)))


def subset(n: int, count: int, *words: int | str) -> np.ndarray:
    """``count`` of the first ``n`` integers, each choice equally likely; rising, shape (count,)."""
    chosen = generator(*words).choice(n, count, replace=False, shuffle=False)
    return np.sort(chosen)
