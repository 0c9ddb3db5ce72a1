"""What happens at the end of the backward pass that is under way."""

import threading
import weakref
from collections.abc import Callable

import torch


class BackwardPass:
    """Autograd calls it when a backward pass has ended well, and drops it when one has raised.

    Nothing but autograd keeps it alive, so that a weak reference says how the pass ended.

    Attributes:
        over: it was called, or is being called.
    """

    def __init__(self) -> None:
        self._ends: list[tuple[int, Callable[[], None]]] = []
        self.over = False

    def join(self, number: int, end: Callable[[], None]) -> None:
        """Call ``end`` at the end of it, in the order of ``number``, which all ranks have alike."""
        self._ends.append((number, end))

    def __call__(self) -> None:
        self.over = True
        # Not in the order of autograd, which may be another on each rank.
        for _, end in sorted(self._ends, key=lambda entry: entry[0]):
            end()


Reference = weakref.ref[BackwardPass]


def is_alive(reference: Reference | None) -> bool:
    """Whether a pass is under way."""
    found = reference() if reference else None
    return found is not None and not found.over


class _Latest(threading.local):
    reference: Reference | None = None


_latest = _Latest()


def join(number: int, end: Callable[[], None]) -> Reference:
    """Join the pass of this thread; call it from one of autograd's hooks."""
    found = _latest.reference() if _latest.reference else None
    if found is None or found.over:
        found = BackwardPass()
        torch.autograd.Variable._execution_engine.queue_callback(found)
        _latest.reference = weakref.ref(found)
    found.join(number, end)
    return weakref.ref(found)
