"""Whether this MPI can send device memory, found out by sending some, in processes that may crash.

MPI libraries say little about it that can be trusted, and one that cannot ends the process.  A
message to oneself takes another road than one to a peer, so two ranks try: those of a small job of
its own on this node, on the GPUs of two of the job's ranks.
"""

import os
import shutil
import subprocess
import sys
from functools import cache

from collectives.launchers import PREFIXES, beside

_KEPT = ("OMPI_MCA_", "OMPI_ALLOW")
#: However few cores there are.
_CROWDED = {
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
}
_TIMEOUT_S = 60
_FINE = "device memory arrived"


@cache
def probe(*gpus: int) -> tuple[bool, str]:
    """Whether messages between buffers on these GPUs arrive, one for each of two ranks, and what
    was seen.  One GPU is that of both, and none the first one.

    Cost: a few seconds, once a process.
    """
    launcher = beside("mpiexec") or shutil.which("mpiexec")
    if launcher is None:
        return False, "there is no mpiexec to try it with; COLLECTIVES_DEVICE says what is so"
    # The children must not take part in their parent's job.
    kept = {k: v for k, v in os.environ.items() if not k.startswith(PREFIXES)}
    tuning = {k: v for k, v in os.environ.items() if k.startswith(_KEPT)}
    command = [launcher, "-n", "2", sys.executable, "-m", __name__, *map(str, gpus)]
    try:
        children = subprocess.run(
            command,
            env={**_CROWDED, **kept, **tuning},
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return False, f"the transfer did not end within {_TIMEOUT_S} s"
    if children.returncode == 0 and children.stdout.count(_FINE) == 2:
        return True, _FINE
    lines = children.stderr.strip().splitlines() or [f"exit status {children.returncode}"]
    errors = [line for line in lines if "Error" in line]
    return False, (errors or lines)[-1]


def main(gpus: list[int]) -> int:
    """A child: a message to the other one and back, large enough for the rendezvous protocol."""
    import cupy
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    if gpus:
        cupy.cuda.Device(gpus[comm.rank % len(gpus)]).use()
    sent = cupy.arange(1 << 20, dtype=cupy.uint8) + cupy.uint8(comm.rank)
    received = cupy.zeros_like(sent)
    cupy.cuda.get_current_stream().synchronize()
    peer = comm.rank ^ 1
    comm.Sendrecv([sent, MPI.BYTE], peer, 0, [received, MPI.BYTE], peer, 0)
    if not bool((received + cupy.uint8(comm.rank) == sent + cupy.uint8(peer)).all()):
        print("Error: the message arrived changed", file=sys.stderr)
        return 1
    print(_FINE)
    return 0


if __name__ == "__main__":
    sys.exit(main([int(text) for text in sys.argv[1:]]))
