"""Extras: parts that are imported at their first use, as ``extras.Watchdog(...)`` in the core."""

import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TypeGuard


@dataclass(frozen=True)
class Extra:
    """A function or class, as ``"package.module:name"``, whose module is imported at its first use.

    Calls are those of the object; :meth:`load` gives the object itself.
    """

    where: str

    def load(self) -> Any:
        """The function or class."""
        module, _, name = self.where.partition(":")
        before = None if module in sys.modules else random.getstate()
        found = import_module(module)  # which waits where another thread imports it
        if before is not None:
            random.setstate(before)  # rich draws when it is imported
        return getattr(found, name)

    #: As of :func:`functools.wraps`: ``inspect`` sees the object's own parameters.
    __wrapped__ = property(load)

    def made(self, one: object) -> TypeGuard[Any]:
        """Whether an object is of this class; if nobody has imported its module, none is."""
        return self.where.partition(":")[0] in sys.modules and isinstance(one, self.load())

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.load()(*args, **options)


def names_of(
    package: str, modules: Mapping[str, str], make: Callable[[str], Any] = lambda w: Extra(w).load()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The ``__getattr__`` and ``__dir__`` of a module (PEP 562); ``modules``: the names that lie in
    each other, ``new=old`` where its own differs; ``make``: what they are, of ``"module:name"``.
    """
    where = {}
    for module, names in modules.items():
        for name in names.split():
            new, _, old = name.partition("=")
            where[new] = f"{module}:{old or new}"

    def find(name: str) -> Any:
        if name not in where:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found = vars(import_module(package))[name] = make(where[name])
        return found

    return find, lambda: sorted({*vars(import_module(package)), *where})


__getattr__: Callable[[str], Extra]
__getattr__, __dir__ = names_of(
    __name__,
    {
        "collectives.algorithms.guard": "guarded",
        "collectives.algorithms.spanning_trees": "trees_of_file=of_file",
        "collectives.analysis.claims": "digest is_aligned kept prove_claims register",
        "collectives.analysis.topology": "LinkCost build_topology=build",
        "collectives.analysis.user_code": "is_own resolve",
        "collectives.calls.nccl": "Nccl bind_nccl fault_of_nccl",
        "collectives.calls.reproducible": "bind_exact is_rounded",
        "collectives.codec": "Dice",
        "collectives.compile.cost": "CostModel=Model best_segments",
        "collectives.execution.device_plan": "DevicePlan gated",
        "collectives.execution.shared": "bind_shared runs_shared",
        "collectives.execution.slot_rounds": "Extent bind_slots extent_of fits_slots",
        "collectives.execution.transport.checked": "CheckedTransport",
        "collectives.execution.transport.cuda_ipc": "exchange release",
        "collectives.execution.transport.cuda_memory": "CudaMemory",
        "collectives.execution.transport.cuda_probe": "probe",
        "collectives.execution.transport.delayed": "delayed",
        "collectives.execution.transport.device": "StagedTransport",
        "collectives.execution.transport.shared_memory": "NodeMemory",
        "collectives.execution.transport.slots": "Slots",
        "collectives.failure.history": "call_site",
        "collectives.failure.report": "say_waiting",
        "collectives.failure.watchdog": "Watchdog report_calls",
    },
    Extra,
)
