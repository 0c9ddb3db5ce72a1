"""CUDA C++ run on the CPU: a block's threads take turns, and change at ``__syncthreads``.

In two orders, first to last and last to first: where a synchronisation is missing, they differ.
"""

import ctypes
import re
import subprocess

import numpy as np

THREADS = 64

_BEFORE = r"""
#include <cmath>
#include <cstring>
#include <ucontext.h>
#include <vector>
#define __global__
#define __device__
#define __shared__ static
struct Extent { unsigned int x; };
static Extent threadIdx, blockIdx, gridDim;
static ucontext_t scheduler, threads[THREADS];
static char stacks[THREADS][1 << 16];
static bool ended[THREADS];
static void __syncthreads() { swapcontext(&threads[threadIdx.x], &scheduler); }
static unsigned int __float_as_uint(float x) { unsigned int y; memcpy(&y, &x, 4); return y; }
static float __uint_as_float(unsigned int x) { float y; memcpy(&y, &x, 4); return y; }
"""

_AFTER = r"""
template <typename Kernel>
static void launch(long long grid, int backwards, Kernel kernel) {
    static Kernel* own;
    own = &kernel;
    gridDim.x = grid;
    for (long long block = 0; block < grid; block++) {
        blockIdx.x = block;
        for (int t = 0; t < THREADS; t++) {
            ended[t] = false;
            getcontext(&threads[t]);
            threads[t].uc_stack.ss_sp = stacks[t];
            threads[t].uc_stack.ss_size = sizeof(stacks[t]);
            threads[t].uc_link = &scheduler;
            makecontext(&threads[t], +[] { (*own)(); ended[threadIdx.x] = true; }, 0);
        }
        for (bool going = true; going;) {
            going = false;
            for (int turn = 0; turn < THREADS; turn++) {
                int t = backwards ? THREADS - 1 - turn : turn;
                if (ended[t]) continue;
                threadIdx.x = t;
                swapcontext(&scheduler, &threads[t]);
                going = true;
            }
        }
    }
}
"""


class Emulated:
    """The kernels of a source, for one type of arrays."""

    def __init__(self, source, kind, folder, backwards=False):
        """``kind``: the number for ``KIND``; ``folder``: for what the compiler makes."""
        self._backwards = backwards
        self._kinds = {}
        stubs = []
        for name, text in re.findall(r"__global__ void (\w+)\(([^)]*)\)", source):
            parameters = [part.strip() for part in text.split(",")]
            names = ", ".join(part.split()[-1].lstrip("*") for part in parameters)
            stubs.append(
                f'extern "C" void run_{name}(long long grid, int backwards, {text}) '
                f"{{ launch(grid, backwards, [=] {{ {name}({names}); }}); }}"
            )
            self._kinds[name] = [_type(part) for part in parameters]
        path, library = folder / f"kernels{kind}.cpp", folder / f"kernels{kind}.so"
        if not library.exists():
            path.write_text("\n".join([_BEFORE, source, _AFTER, *stubs]))
            flags = ["-std=c++17", "-O1", "-shared", "-fPIC", "-w"]
            given = [f"-DKIND={kind}", f"-DTHREADS={THREADS}"]
            subprocess.run(["g++", *flags, *given, path, "-o", library], check=True)
        self._library = ctypes.CDLL(str(library))

    def __call__(self, name, blocks, *arguments):
        """Run a kernel; arrays are NumPy's, row after row."""
        function = getattr(self._library, f"run_{name}")
        function.argtypes = [ctypes.c_longlong, ctypes.c_int, *self._kinds[name]]
        function.restype = None
        given = []
        for one in arguments:
            if isinstance(one, np.ndarray):
                assert one.flags.c_contiguous
                one = one.ctypes.data
            given.append(one)
        function(blocks, self._backwards, *given)


def _type(parameter):
    if "*" in parameter:
        return ctypes.c_void_p
    return ctypes.c_double if parameter.startswith("double") else ctypes.c_longlong
