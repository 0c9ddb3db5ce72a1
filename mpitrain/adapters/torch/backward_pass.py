"""Calls at the end of the backward pass that is under way."""

import threading
import weakref
from collections.abc import Callable

import torch


class BackwardPass:
    """Autograd calls it when a backward pass has ended well, and drops it when one has raised.

    Only autograd keeps it alive, so that a weak reference shows how the pass ended.

    Attributes:
        over: whether the pass has ended.
    """

    def __init__(self) -> None:
        self._ends: list[tuple[int, Callable[[], None]]] = []
        self.over = False

    def __call__(self) -> None:
        self.over = True
        # The order of autograd may differ between ranks.
        for _, end in sorted(self._ends, key=lambda entry: entry[0]):
            end()

    @classmethod
    def join(cls, number: int, end: Callable[[], None]) -> "weakref.ref[BackwardPass]":
        """Call ``end`` at the end of this thread's backward pass; call it from a hook of autograd.

        ``number`` orders the calls, alike on all ranks.
        """
        found = _latest.reference() if _latest.reference else None
        if found is None or found.over:
            found = cls()
            torch.autograd.Variable._execution_engine.queue_callback(found)
            _latest.reference = weakref.ref(found)
        found._ends.append((number, end))
        return weakref.ref(found)


class _Latest(threading.local):
    reference: weakref.ref[BackwardPass] | None = None


_latest = _Latest()


def is_alive(reference: weakref.ref[BackwardPass] | None) -> bool:
    """Whether a backward pass is under way."""
    found = reference() if reference else None
    return found is not None and not found.over
