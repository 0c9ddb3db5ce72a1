"""Kernels in CUDA C++, for which the stand-in runs the function of ``twins`` of this name.

A kernel writes what its source does not declare as ``const``."""

import re

import numpy as np

from tests.queued_cupy import twins
from tests.queued_cupy.ndarray import launch, ndarray, unwrapped


class RawKernel:
    """CuPy's: ``kernel(grid, block, arguments)``."""

    def __init__(
        self, code, name, options=(), backend="nvrtc", *, translate_cucomplex=False,
        enable_cooperative_groups=False, jitify=False,
    ):  # fmt: skip
        if backend != "nvrtc" or not isinstance(options, tuple):
            raise ValueError("options is a tuple of strings, and the backend NVRTC")
        if f" {name}(" not in code:
            raise ValueError(f"CUDA_ERROR_NOT_FOUND: the source has no kernel {name}")
        self.name, self.code, self.options = name, code, options
        parameters = re.search(rf" {name}\(([^)]*)\)", code)[1].split(",")
        self.constant = [one.strip().startswith("const ") for one in parameters]

    def __call__(self, grid, block, args, *, shared_mem=0, stream=None):
        _expect_extents(grid, block)
        for one in args:
            if isinstance(one, np.ndarray) or not isinstance(
                one, (ndarray, np.generic, int, float)
            ):
                raise TypeError(f"Unsupported type {type(one)} as an argument of {self.name}")
        given = [unwrapped(one, self.name) for one in args]
        arrays = [one for one in given if isinstance(one, np.ndarray)]
        writes = [one for one, is_const in zip(given, self.constant) if not is_const]
        writes = [one for one in writes if isinstance(one, np.ndarray)]
        launch(self.name, lambda: getattr(twins, self.name)(*given), reads=arrays, writes=writes)


def _expect_extents(grid, block):
    """``RuntimeError`` for a launch that CUDA refuses."""
    threads = int(np.prod(block))
    if not 0 < threads <= 1024 or min(*grid, *block) < 1 or max(grid) >= 1 << 31:
        raise RuntimeError(f"CUDA_ERROR_INVALID_VALUE: grid {grid}, block {block}")
