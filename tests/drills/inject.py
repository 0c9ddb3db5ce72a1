"""Faults that a rank does to itself, at a step of its training."""

import os
import random
import signal
import subprocess
import threading

import numpy as np
from mpi4py import MPI

from collectives import CheckedTransport, MPITransport
from collectives.execution.transport import Bytes
from collectives.execution.transport.checked import Sealed
from mpitrain.config import ConfigError
from mpitrain.training.parts import Parts
from tests.drills.faults import KINDS, Fault


class Injector:
    """Strikes once, on the rank and before the step of its fault; the ``before_step`` of a job."""

    def __init__(self, fault: Fault, comm: MPI.Intracomm) -> None:
        if not KINDS[fault.kind].inside:
            raise ConfigError(f"no rank does {fault.kind!r} to itself; python -m tests.drills can")
        if not 0 <= fault.rank < comm.size:
            raise ConfigError(f"there is no rank {fault.rank} of {comm.size}")
        self.fault = fault
        self._own = comm.rank == fault.rank
        self._rng = random.Random(fault.seed)
        self._corrupts = False

    def __call__(self, parts: Parts) -> None:
        if not self._own or parts.steps_done + 1 != self.fault.step:
            return
        match self.fault.kind:
            case "kill":
                self._later(os.getpid(), signal.SIGKILL)
            case "daemon":
                self._later(os.getppid(), signal.SIGKILL)
            case "freeze":
                self._later(os.getpid(), signal.SIGSTOP)
            case "pause":
                again = f"sleep {self.fault.seconds}; kill -CONT {os.getpid()}"
                subprocess.Popen(["sh", "-c", again], start_new_session=True)
                os.kill(os.getpid(), signal.SIGSTOP)
            case "payload":
                self._corrupts = True
            case "memory":
                flip(parts.store.pieces[0].parameters.view(np.uint8), self._rng)

    def transport(self) -> type[MPITransport]:
        """Transport that flips one bit in the next message after ``payload`` has struck."""
        injector = self

        class Corrupting(Sealed):
            def seal(self) -> None:
                super().seal()
                if injector._corrupts:
                    injector._corrupts = False
                    flip(self.data, injector._rng)

        class CorruptingTransport(CheckedTransport):
            @classmethod
            def envelope(cls, data: Bytes) -> Sealed:
                return Corrupting(data)

        return CorruptingTransport

    def _later(self, process: int, number: signal.Signals) -> None:
        """In the midst of the step."""
        timer = threading.Timer(self.fault.seconds, os.kill, (process, number))
        timer.daemon = True
        timer.start()


def flip(data: Bytes, rng: random.Random) -> None:
    data[rng.randrange(data.size)] ^= 1 << rng.randrange(8)
