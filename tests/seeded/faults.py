"""Thirty faults, each a change of one place: a wait dropped, a tag swapped, an index off by one."""

from typing import NamedTuple


class Fault(NamedTuple):
    """``old``, which ``path`` has exactly once, becomes ``new``; ``near`` has tests that notice."""

    name: str
    near: str
    path: str
    old: str
    new: str


FAULTS = [
    # The schedules, and their proofs.
    Fault(
        "ring: a chunk off by one",
        "tests/unit/collectives/test_verify.py",
        "collectives/algorithms/ring.py",
        "leaving, arriving = (rank - step) % size, (rank - 1 - step) % size",
        "leaving, arriving = (rank - step) % size, (rank - step) % size",
    ),
    Fault(
        "butterfly: the extra ranks get no result",
        "tests/unit/collectives/test_verify.py",
        "collectives/algorithms/butterfly.py",
        "        yield (Recv(rank - 1, everything),)\n        return\n    if fold.extra:\n"
        "        yield (RecvReduce(rank + 1, everything, held),)",
        "        yield ()\n        return\n    if fold.extra:\n"
        "        yield (RecvReduce(rank + 1, everything, held),)",
    ),
    Fault(
        "double binary tree: the last rank is nobody's child",
        "tests/unit/collectives/test_verify.py",
        "collectives/algorithms/double_binary_tree.py",
        "if child != place)",
        "if child not in (place, size - 1))",
    ),
    Fault(
        "rooted: blocks turned the wrong way",
        "tests/unit/collectives/test_verify.py",
        "collectives/algorithms/rooted.py",
        "start, stop = chunk.start + root, chunk.stop + root",
        "start, stop = chunk.start - root, chunk.stop - root",
    ),
    Fault(
        "segments: the second block's lie in the first",
        "tests/unit/collectives/test_verify.py",
        "collectives/algorithms/segments.py",
        "offset = (block * (count - 1) + segment) * n",
        "offset = segment * n",
    ),
    Fault(
        "verify: a contribution counted twice passes",
        "tests/unit/collectives/test_verify.py",
        "collectives/analysis/verify.py",
        "if left.ranks & right.ranks and not self.contract.idempotent:",
        "if False and not self.contract.idempotent:",
    ),
    Fault(
        "verify: ranks that reduce in another order pass",
        "tests/unit/collectives/test_verify.py",
        "collectives/analysis/verify.py",
        "if same.tree != got.tree and not self.contract.idempotent:",
        "if False and not self.contract.idempotent:",
    ),
    Fault(
        "simulate: a port's messages start side by side",
        "tests/unit/collectives/test_cost_models.py",
        "collectives/analysis/simulate.py",
        "latency = latency * most",
        "latency = np.minimum(latency, latency * most)",
    ),
    # Schedules bound to memory.
    Fault(
        "messages: tags counted over all peers",
        "tests/mpi/collectives/test_drawn.py",
        "collectives/execution/messages.py",
        "route = isinstance(step, Send), step.peer",
        "route = isinstance(step, Send), 0",
    ),
    Fault(
        "messages: a chunk that is still being sent is reduced into",
        "tests/local/test_orders.py",
        "collectives/execution/messages.py",
        "(late if busy else bound.finish).append(reduction)",
        "bound.finish.append(reduction)",
    ),
    Fault(
        "messages: the operands of a reduction swapped",
        "tests/local/test_local.py",
        "collectives/execution/messages.py",
        "operands = (arrived, own) if step.peer < self.transport.rank else (own, arrived)",
        "operands = (own, arrived)",
    ),
    Fault(
        "messages: in place, the input is not copied aside",
        "tests/local/test_local.py",
        "collectives/execution/messages.py",
        "aside = aside or not schedule.in_place",
        "aside = aside or False",
    ),
    Fault(
        "plan: sends are not waited for",
        "tests/local/test_orders.py",
        "collectives/execution/messages.py",
        "bound.finish += [*(request.Wait for request in sends), *late]",
        "bound.finish += late",
    ),
    Fault(
        "shared memory: what a peer still reads is written to",
        "tests/local/test_races.py",
        "collectives/execution/shared_rounds.py",
        "return not all(map(wait.cells.isdisjoint, by_others))",
        "return not (wait.reading or all(map(wait.cells.isdisjoint, by_others)))",
    ),
    Fault(
        "shared memory: the last tick is not waited for",
        "tests/local/test_races.py",
        "collectives/execution/shared_rounds.py",
        "ending = self.wait(left, [])",
        "ending = self.wait([], [])",
    ),
    Fault(
        "shared memory: two meetings use the same words",
        "tests/mpi/collectives/test_drawn.py",
        "collectives/execution/transport/shared_memory.py",
        "for first in (SLOTS * _LINE, SLOTS * _LINE + WORDS):",
        "for first in (SLOTS * _LINE, SLOTS * _LINE):",
    ),
    # Calls.
    Fault(
        "plan cache: a plan found whatever the length",
        "tests/mpi/collectives/test_drawn.py",
        "collectives/calls/plan_cache.py",
        "return _address(buffer), buffer.nbytes, buffer.dtype\n    if buffer is None",
        "return _address(buffer), buffer.dtype\n    if buffer is None",
    ),
    Fault(
        "call: a plan found whatever the operation",
        "tests/mpi/collectives/test_drawn.py",
        "collectives/calls/call.py",
        "            _identity(self.op),\n",
        "",
    ),
    Fault(
        "buffers: the displacement is left out",
        "tests/mpi/collectives/test_communicator.py",
        "collectives/calls/buffers.py",
        "part = items.view(np.uint8)[first * self.extent : (first + length) * self.extent]",
        "part = items.view(np.uint8)[: length * self.extent]",
    ),
    Fault(
        "bind: results are not unpacked into gaps",
        "tests/mpi/collectives/test_buffer_kinds.py",
        "collectives/calls/bind.py",
        "self.after.insert(0, partial(buffer.gaps.unpack, buffer.items))",
        "self.after.insert(0, partial(buffer.gaps.pack, buffer.items))",
    ),
    Fault(
        "call: bitwise or for exclusive or",
        "tests/mpi/collectives/test_drawn.py",
        "collectives/execution/memory.py",
        '"bxor": (np.bitwise_xor, INTEGER)',
        '"bxor": (np.bitwise_or, INTEGER)',
    ),
    Fault(
        "engine: native calls do not end the plans under way",
        "tests/mpi/collectives/test_communicator.py",
        "collectives/calls/engine.py",
        "        self.progress.drain()\n        if self.progress.traffic",
        "        if self.progress.traffic",
    ),
    # The trainer.
    Fault(
        "clip: the norm of this rank alone",
        "tests/mpi/mpitrain/test_layouts.py",
        "mpitrain/step/gradient.py",
        "if self._grid.counts(piece.group)\n        ]",
        "if self._grid.counts(piece.group) and self._grid.comm.rank == 0\n        ]",
    ),
    Fault(
        "loss: a mean over the micro-batch and not the batch",
        "tests/mpi/mpitrain/test_layouts.py",
        "mpitrain/training/batches.py",
        "whole = len(self._batches[micro_batch // self._parts]) * each",
        "whole = len(self._batches[micro_batch // self._parts]) // self._parts * each",
    ),
    Fault(
        "sampler: every epoch in the same order",
        "tests/unit/mpitrain/test_sampler.py",
        "mpitrain/data/sampler.py",
        "spawn_key=(epoch, *self.stream)",
        "spawn_key=(0, *self.stream)",
    ),
    Fault(
        "checkpoint: the number of updates is not restored",
        "tests/mpi/mpitrain/test_resuming.py",
        "mpitrain/checkpoint/state.py",
        "parts.updater.resume(progress.updates, ",
        "parts.updater.resume(0, ",
    ),
    Fault(
        "checkpoint: other data are not refused",
        "tests/mpi/mpitrain/test_resuming.py",
        "mpitrain/checkpoint/changes.py",
        "if manifest.data != parts.data_digest:",
        "if False:",
    ),
    Fault(
        "pipeline: the last stage's gradient is not that of its micro-batch",
        "tests/mpi/mpitrain/test_layouts.py",
        "mpitrain/pipeline/runtime.py",
        "memory, kept_dy, terms = saved.pop(key)",
        "memory, kept_dy, terms = saved.pop(min(saved))",
    ),
    # The backend of torch.distributed.
    Fault(
        "torch: a call that blocks overtakes those in the background",
        "tests/launch/test_torch_threads.py",
        "collectives/torch/order.py",
        "while self.calls:\n                self._run_first()\n            self._is_running = True",
        "self._is_running = True",
    ),
    Fault(
        "torch: what a code leaves out is kept where a gradient is no number",
        "tests/mpi/mpitrain/test_torch_codes.py",
        "mpitrain/adapters/torch/compression.py",
        "(found.commit if found.is_finite else found.rollback)()",
        "found.commit()",
    ),
]
