"""All ranks of a collective in this process, with a GPU each whose work is queued."""

from contextlib import ExitStack, contextmanager

import numpy as np

from collectives.algorithms import build
from collectives.execution.local import connect
from collectives.execution.messages import Operands, bind
from collectives.execution.plan import Binding
from collectives.execution.progress import Progress
from collectives.execution.transport.cuda_memory import CudaMemory
from collectives.execution.transport.device import StagedTransport
from tests import queued_cupy
from tests.queued_cupy import Machine, RecordedLocal


class Ranks:
    """A plan for each rank, on buffers that its caller's stream writes and reads."""

    def __init__(self, patch, size, road, seed=None):
        self.cupy = queued_cupy.install(patch, Machine(devices=size, seed=seed))
        self.machine = self.cupy.machine
        self.memories = [CudaMemory(gpu) for gpu in range(size)]
        self.progresses = [Progress() for _ in range(size)]
        self.transports = []
        for local, memory in zip(connect(size), self.memories):
            recorded = RecordedLocal(local)
            staged = StagedTransport(recorded, memory)
            self.transports.append(staged if road == "staged" else recorded)
        self.streams = []
        for gpu in range(size):
            with self.cupy.cuda.Device(gpu):
                self.streams.append(self.cupy.cuda.Stream(non_blocking=True))

    @contextmanager
    def at(self, rank):
        """In it, the rank's GPU and the caller's stream there are current."""
        with ExitStack() as stack:
            stack.enter_context(self.cupy.cuda.Device(rank))
            stack.enter_context(self.streams[rank])
            yield

    def put(self, rank, items):
        """Work on the caller's stream writes ``items``."""
        with self.at(rank):
            return self.cupy.asarray(items)

    def bind(self, schedule, sends, received, combine=np.add, tags=None):
        """Plans; ``received``: items of each rank's receive buffer."""
        self.outputs = []
        plans = []
        for rank, (memory, send) in enumerate(zip(self.memories, sends)):
            member = schedule.member(rank)._replace(chunks=1)
            blocks = schedule.contract.recv_blocks(member)
            with self.at(rank):
                out = self.cupy.zeros(received[rank], send.dtype) if blocks else None
            self.outputs.append(out)
            given = send if schedule.contract.send_blocks(member) else None
            with memory.working():
                end = self.transports[rank]
                binding = Binding("", self.progresses[rank], tags, memory)
                plan = bind(schedule, end, Operands(given, out), combine, binding)
            plans.append(plan)
        return plans

    def all_reduce(self, count=60, algorithm="ring", tags=None):
        """Plans of an all-reduce, their inputs still queued; and its result."""
        size = len(self.memories)
        inputs = [np.arange(count) * (rank + 1) for rank in range(size)]
        sends = [self.put(rank, items) for rank, items in enumerate(inputs)]
        plans = self.bind(build("allreduce", algorithm, size), sends, [count] * size, tags=tags)
        return plans, sum(inputs)

    def start(self, plans):
        for rank, plan in enumerate(plans):
            with self.at(rank):
                plan.Start()

    def move(self, *groups):
        """As far as the last messages; each group has a plan for each rank."""
        for _ in range(10_000):
            left = [
                (rank, plan)
                for plans in groups
                for rank, plan in enumerate(plans)
                if plan.completed + 1 < len(plan.rounds)
            ]
            if not left:
                return
            for rank, plan in left:
                with self.at(rank):
                    plan.Test()
        raise AssertionError("the ranks wait for one another for ever")

    def wait(self, plans):
        """Each rank's caller goes on behind its plan."""
        self.move(plans)
        for rank, plan in enumerate(plans):
            with self.at(rank):
                plan.Wait()

    def results(self):
        """As work on the callers' streams finds them."""
        found = []
        for rank, out in enumerate(self.outputs):
            with self.at(rank):
                found.append(None if out is None else out.copy())
        return [self._read(rank, copy) for rank, copy in enumerate(found)]

    def _read(self, rank, copy):
        with self.at(rank):
            return None if copy is None else copy.get()
