"""Stage 0: what machine, what software."""

import shutil
import subprocess
import sys

from mpi4py import MPI

from mpitrain.device.choice import look
from tests.gpu.check import Check


def versions():
    import cupy

    found = look(0)
    assert not found.why, found.why
    gpu = cupy.cuda.runtime.getDeviceProperties(found.number)["name"].decode()
    python = ".".join(map(str, sys.version_info[:3]))
    vendor = " ".join(map(str, MPI.get_vendor()))
    level = {0: "single", 1: "funneled", 2: "serialized", 3: "multiple"}[MPI.Query_thread()]
    visible = cupy.cuda.runtime.getDeviceCount()
    return (
        f"{gpu}, {visible} visible; CuPy {cupy.__version__}, Python {python}, {vendor}, "
        f"threads {level}"
    )


def ucx():
    if not shutil.which("ucx_info"):
        return "no ucx_info: which transports UCX has is unknown"
    printed = subprocess.run(["ucx_info", "-d"], capture_output=True, text=True, timeout=30).stdout
    kinds = [name for name in ("cuda_copy", "cuda_ipc", "gdr_copy") if name in printed]
    return f"UCX has {', '.join(kinds) or 'nothing for CUDA: messages are staged'}"


def memory():
    import cupy

    x = cupy.zeros(1 << 20, "f4")
    x += 1
    assert float(x.sum()) == 1 << 20
    return "arrays are made, filled and read"


CHECKS = [
    Check(0, "facts.versions", versions),
    Check(0, "facts.ucx", ucx),
    Check(0, "facts.memory", memory),
]
