"""Whether this MPI can send device memory, found out by sending some, in a process that may crash.

MPI libraries say little about it that can be trusted, and one that cannot ends the process.
"""

import os
import subprocess
import sys

#: The child is on its own: it must not take part in its parent's job.
_OF_THE_JOB = ("OMPI_", "PMI", "PRTE_", "HYDRA_", "MPIR_", "SLURM_")
_TIMEOUT_S = 60
_FINE = "device memory arrived"


def probe() -> tuple[bool, str]:
    """Whether a message between two buffers on this GPU arrives, and what was seen.

    Cost: a few seconds, once.
    """
    kept = {k: v for k, v in os.environ.items() if not k.startswith(_OF_THE_JOB)}
    tuning = {k: v for k, v in os.environ.items() if k.startswith(("OMPI_MCA_", "OMPI_ALLOW"))}
    try:
        child = subprocess.run(
            [sys.executable, "-m", __name__],
            env={**kept, **tuning},
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return False, f"the transfer did not end within {_TIMEOUT_S} s"
    if child.returncode == 0 and _FINE in child.stdout:
        return True, _FINE
    last = (child.stderr.strip().splitlines() or [f"exit status {child.returncode}"])[-1]
    return False, last


def main() -> int:
    """The child: a message to itself, large enough for the rendezvous protocol."""
    import cupy
    from mpi4py import MPI

    sent = cupy.arange(1 << 20, dtype=cupy.uint8)
    received = cupy.zeros_like(sent)
    cupy.cuda.get_current_stream().synchronize()
    MPI.COMM_SELF.Sendrecv([sent, MPI.BYTE], 0, 0, [received, MPI.BYTE], 0, 0)
    if not bool((sent == received).all()):
        print("the message arrived changed", file=sys.stderr)
        return 1
    print(_FINE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
