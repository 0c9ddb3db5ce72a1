"""Faults in what orders a GPU's work, and modules that have one of them.

A fault must be noticed by the scenario that stands beside it (tests/local/test_device_mutants.py),
and those of :data:`ON_RANKS` by the sums of tests/gpu/controls.py.
"""

import sys
from contextlib import contextmanager
from importlib import import_module
from importlib.machinery import SourceFileLoader
from importlib.util import spec_from_file_location

from tests.seeded.fault import ROOT, Fault

_PLAN = "collectives/execution/device_plan.py"
_MEMORY = "collectives/execution/transport/cuda_memory.py"
_DEVICE = "collectives/execution/transport/device.py"
_TRAINER = "mpitrain/device/cuda.py"

ALONE = [
    Fault("messages start without a gate", "direct", _PLAN,
          "rounds += behind(gate, BoundRound(starts=[*copies]))",
          "rounds.append(BoundRound(starts=[*copies]))"),
    Fault("receives start without a gate", "receives", _PLAN,
          "        if each.requests:\n            copies",
          "        if each.requests and len(each.finish) > 1:\n            copies"),
    Fault("a gate is always open", "direct", _PLAN,
          "        return self.event.done\n", "        return True\n"),
    Fault("a gate tells of the run before", "again", _PLAN,
          "    def Start(self) -> None:\n        self.event.record()\n",
          "    def Start(self) -> None:\n        self.seen = getattr(self, 'seen', 0) + 1\n"
          "        if self.seen == 1:\n            self.event.record()\n"),
    Fault("a gate stops the host", "unheld", _PLAN,
          "        return self.event.done\n",
          "        self.event.synchronize()\n        return True\n"),
    Fault("the host waits for the callers at the start", "unheld", _PLAN,
          "        del self.events[len(callers) :]\n",
          "        del self.events[len(callers) :]\n        self._memory.wait_for_callers()\n"),
    Fault("a plan's wait holds up another plan's rounds", "later", _PLAN,
          "        return not self._has_gates or not any(\n", "        return True or any(\n"),
    Fault("the plan does not follow the caller", "direct", _PLAN,
          "        self._memory.follow(self.events)\n", "        pass\n"),
    Fault("the callers are marked too late", "late", _PLAN,
          "        self._memory.mark(callers, self.events)\n\n", "\n"),
    Fault("the caller does not follow the plan", "staged", _PLAN,
          "            stream.wait_event(self.event)\n", "            pass\n"),
    Fault("a true Test is not waited for", "read", _PLAN,
          "requests=[self._end], finish", "requests=[], finish"),
    Fault("the end is recorded before the last copies", "read", _PLAN,
          "    def Start(self) -> None:\n        self._progress.expect_whole()\n",
          "    def Start(self) -> None:\n        self._end.event.record = lambda: None\n"),
    Fault("a plan works on any stream", "elsewhere", _MEMORY,
          "self.cupy.cuda.Device(self.gpu), self.stream:", "self.cupy.cuda.Device(self.gpu):"),
    Fault("a plan works on any GPU", "elsewhere", _MEMORY,
          "        with self.cupy.cuda.Device(self.gpu), self.stream:\n",
          "        with self.cupy.cuda.Device(0):\n"),
    Fault("another library's stream is not followed", "torch", _MEMORY,
          "        if torch is not None and torch.cuda.is_initialized():",
          "        if torch is not None and not torch.cuda.is_initialized():"),
    Fault("copies to pinned memory go to the null stream", "staged", _MEMORY,
          "nbytes, runtime.memcpyDefault, stream.ptr)", "nbytes, runtime.memcpyDefault, 0)"),
    Fault("pinned memory is taken while it is copied from", "pinned", _DEVICE,
          "            if idle[at].free.done:", "            if True:"),
    Fault("pinned memory is given back without an event", "pinned", _DEVICE,
          "        bounce.free.record()\n", ""),
    Fault("pinned memory goes while it is copied from", "dropped", _DEVICE,
          "        weakref.finalize(self, _settle, self._all).atexit = False\n", ""),
    Fault("what is sent is copied behind the gate", "staged", _PLAN,
          "            copies = [r.prepare for r in each.requests if isinstance(r, StagedSend)]\n",
          "            copies = []\n"
          "            sends = [r for r in each.requests if isinstance(r, StagedSend)]\n"
          "            each.starts[:0] = [r.prepare for r in sends]\n"),
    Fault("pinned memory is another's before the copy is queued", "pinned", _DEVICE,
          "        self.memory.upload(self.data, self._bounce.host[: self.data.nbytes])\n"
          "        super().finish()\n",
          "        bounce = self._bounce\n        super().finish()\n"
          "        self.memory.upload(self.data, bounce.host[: self.data.nbytes])\n"),
    Fault("a copy ahead takes memory that is still in use", "ahead", _TRAINER,
          "        self._copies.wait_event(self._mark())\n", ""),
    Fault("kernels begin before a copy ahead has ended", "ahead", _TRAINER,
          "            self.xp.cuda.get_current_stream().wait_event(copied)\n", ""),
    Fault("the end of a copy ahead is marked on another stream", "ahead", _TRAINER,
          "copied = self._mark(self._copies)", "copied = self._mark()"),
    Fault("nobody keeps what is copied ahead", "ahead", _TRAINER,
          "        self._copying.append((copied, pinned, array))\n", ""),
    Fault("a snapshot is read before it is there", "brought", _TRAINER,
          "        if not self.done:\n", "        if False:\n"),
    Fault("a snapshot is taken for done on another stream", "brought", _TRAINER,
          "host, self._mark())", "host, self._mark(self._copies))"),
    Fault("the host reads device memory as its own", "brought", _TRAINER,
          "return self.xp.asnumpy(array)", "return np.asarray(array)"),
    Fault("numbers are read one by one", "trained", _TRAINER,
          "found = iter(self.xp.asnumpy(together).tolist())",
          "found = iter([*map(float, together)])"),
    Fault("a step waits for the GPU in its midst", "trained", "mpitrain/training/account.py",
          "[own, squares, counted, parts.store.squares]",
          "[own, float(squares), counted, parts.store.squares]"),
    Fault("a kernel's arguments swapped", "trained", "mpitrain/kernels/cuda.py",
          '"gelu_gradient", x, tanh, dy, dx,', '"gelu_gradient", x, dy, tanh, dx,'),
    Fault("a kernel is passed the host's array", "trained", "mpitrain/kernels/cuda.py",
          "        y, tanh = self._like(x), self._like(x)\n",
          "        y, tanh = self._like(x), np.empty(x.shape, x.dtype)\n"),
    Fault("a layer asks for what CuPy does not have", "trained", "mpitrain/nn/attention.py",
          "array_namespace(x).ascontiguousarray(by_head)",
          "array_namespace(x).ascontiguousarray(by_head, dtype=x.dtype, like=x)"),
]  # fmt: skip

#: For ranks, where tests/gpu/controls.py has sums that they spoil.
ON_RANKS = [
    Fault("a blocking call passes its gates unasked", "direct", _PLAN,
          "while not self.is_only_queued and not super().Test():", "while False:"),
    Fault("a rank tells its peers too early", "ipc", "collectives/execution/shared_rounds.py",
          "rounds = [bound] if self.gate is None else behind(self.gate, bound)",
          "rounds = [bound]"),
]  # fmt: skip


_PARTS = ("queued_cupy", "local", "gpu")
_ANEW = ("collectives", "mpitrain", "tests.mpi", *(f"tests.{p}" for p in _PARTS))


class _Finder(SourceFileLoader):
    """Finds the module with the fault in it; its text leaves no trace on the disk."""

    def __init__(self, mutant):
        super().__init__(mutant.path.removesuffix(".py").replace("/", "."), str(ROOT / mutant.path))
        self.mutant = mutant

    def get_code(self, fullname):
        return compile(self.mutant.text(), self.path, "exec")

    def find_spec(self, fullname, path, target=None):
        if fullname == self.name:
            return spec_from_file_location(fullname, self.path, loader=self)
        return None


@contextmanager
def mutated(mutant):
    """In it, modules are imported anew, one of them with the fault."""
    parent = sys.modules["tests"]  # whose attributes name them, too
    before = _without(sys.modules, _ANEW), _without(vars(parent), _PARTS)
    sys.meta_path.insert(0, finder := _Finder(mutant))
    try:
        yield import_module
    finally:
        sys.meta_path.remove(finder)
        for names, begins, kept in zip((sys.modules, vars(parent)), (_ANEW, _PARTS), before):
            _without(names, begins)
            names.update(kept)


def _without(names, begins):
    """Takes out, and returns, what has names that begin so."""
    return {name: names.pop(name) for name in [*names] if name.startswith(begins)}
