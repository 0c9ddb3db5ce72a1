"""The random numbers and the program of each rank, in a process that has many.

The generators are Python's, NumPy's and torch's.
"""

import random
import sys
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from types import ModuleType
from typing import Any

from numpy.random import mtrand


def remembered() -> Callable[[], None]:
    """A function that gives a rank back its generators, which are where they are now, and its
    module ``__main__``, in which pickles look for the classes of its program.

    Torch's, if it is loaded only then, begins as in a new process.
    """
    pythons, numpys, torchs = random.getstate(), mtrand.get_bit_generator(), None
    program = sys.modules["__main__"]
    if loaded := sys.modules.get("torch"):
        torchs = loaded.get_rng_state()

    def back() -> None:
        sys.modules["__main__"] = program
        random.setstate(pythons)
        mtrand.set_bit_generator(numpys)  # faster than its state
        torch: Any = sys.modules.get("torch")
        if torch:
            torch.set_rng_state(torch.Generator().get_state() if torchs is None else torchs)

    return back


def copy_own() -> None:
    """Draw from a copy from now on, as of NumPy the generator itself is remembered."""
    mtrand.set_bit_generator(deepcopy(mtrand.get_bit_generator()))


def script(path: Path, *arguments: str) -> Callable[[], None]:
    """A function that runs a file as the program of a rank, with these arguments."""
    code = compile(path.read_bytes(), path, "exec")
    sys.argv, sys.path[0] = [str(path), *arguments], str(path.parent)

    def program() -> None:
        module = sys.modules["__main__"] = ModuleType("__main__")
        module.__file__ = str(path)
        exec(code, vars(module))

    return program
