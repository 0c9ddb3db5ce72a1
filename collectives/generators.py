"""Generators of random numbers that a program draws from: Python's, NumPy's and torch's."""

import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np


def remembered() -> Callable[[], None]:
    """A function that takes the generators back to where they are now.

    That of torch, if it is loaded only then, begins as in a new process.
    """
    pythons, numpys, torchs = random.getstate(), np.random.get_state(legacy=False), None
    if loaded := sys.modules.get("torch"):
        torchs = loaded.get_rng_state()

    def back() -> None:
        random.setstate(pythons)
        np.random.set_state(numpys)
        torch: Any = sys.modules.get("torch")
        if torch:
            torch.set_rng_state(torch.Generator().get_state() if torchs is None else torchs)

    return back
