"""Choice of a rank's device: named in the job, found on the machine, agreed by all ranks."""

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from collectives import Communicator
from collectives.errors import INSTALL_CUPY, words
from mpitrain import extras
from mpitrain.config import Config, ConfigError, needs_host
from mpitrain.device.host import HOST, Device

log = logging.getLogger("mpitrain")


class RankGPUs(NamedTuple):
    """GPUs of a rank's machine.

    Attributes:
        why: reason why it cannot compute on a GPU, or empty.
        number: index of its GPU among the visible ones.
        identity: unique name of this GPU.
    """

    why: str
    number: int = 0
    identity: str = ""


def choose(config: Config, comm: Communicator) -> Device:
    """Device of this rank for ``run.device``, of one kind on all ranks; collective but for cpu.

    A rank takes the GPU of its number on the machine, or the one that it sees.  Ranks share GPUs
    where there are fewer, which is logged.  ConfigError on all ranks: ``cuda`` is named and one of
    them has no GPU.
    """
    wanted = config.run.device
    if wanted == "cpu":
        return HOST
    alone = needs_host(config)
    if alone:  # the job says so; ``cuda`` was refused with it
        log.info("run.device = 'auto' is cpu: %s", alone)
        return HOST
    found: list[RankGPUs] = comm.allgather(look(local_rank(comm), config.run.compute))
    if why := lacking(found):
        reason = f"{why}; start every rank where it sees a GPU, or set run.device = 'cpu'"
        if wanted == "cuda":
            raise ConfigError(f"run.device = 'cuda': {reason}")
        log.info("run.device = 'auto' is cpu: %s", reason)
        return HOST
    sharing = Counter(one.identity for one in found)
    if (most := max(sharing.values())) > 1:
        log.warning(
            "%d ranks share %d GPUs, up to %d ranks one: each computes in its turn",
            comm.size, len(sharing), most,
        )  # fmt: skip
    return extras.Cuda(found[comm.rank].number)


def lacking(found: Sequence[RankGPUs]) -> str:
    """Ranks that cannot compute on a GPU, with reasons; empty if all can."""
    told = [f"rank {rank}: {one.why}" for rank, one in enumerate(found) if one.why]
    more = f"; {len(told) - 3} more ranks cannot, either" if told[3:] else ""
    return "; ".join(told[:3]) + more


def local_rank(comm: MPI.Intracomm) -> int:
    """Number of the rank on its machine; collective."""
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    found: int = node.rank
    node.Free()
    return found


def look(local: int, compute: str = "same") -> RankGPUs:
    """Looks for a GPU on this rank, which has the number ``local`` on its machine; loads CuPy."""
    try:
        import cupy
    except ImportError as error:
        return RankGPUs(f"CuPy cannot be imported ({error}): {INSTALL_CUPY}")
    if compute == "bfloat16" and int(cupy.__version__.partition(".")[0]) < 14:
        return RankGPUs(f"bfloat16 needs CuPy 14, and this is {cupy.__version__}")
    try:
        visible = cupy.cuda.runtime.getDeviceCount()
        if not visible:
            return RankGPUs("it sees no GPU; CUDA_VISIBLE_DEVICES may hide it")
        number = local % visible
        with cupy.cuda.Device(number):
            cupy.asnumpy(cupy.zeros(1, np.float32) + 1)  # a kernel that works
            return RankGPUs("", number, _identity(cupy, number))
    except Exception as error:  # from a driver, a compiler, memory
        return RankGPUs(f"its GPU does not work ({words(error)})")


def _identity(cupy: Any, number: int) -> str:
    """Name of a GPU that is the same for all ranks."""
    unique = cupy.cuda.runtime.getDeviceProperties(number).get("uuid")
    if unique:
        return bytes(unique).hex()
    return f"{MPI.Get_processor_name()} {cupy.cuda.Device(number).pci_bus_id}"
