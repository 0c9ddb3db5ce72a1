"""How a rank waits for another: it looks, and gives its core away between two looks."""

import os
import threading
import time
from collections.abc import Callable
from math import inf

from collectives import extras

#: A yield that takes longer has given the core to another program: seconds.
_CONTENDED_S = 2e-4
#: How long a rank believes that its core is contended: seconds.
_MEMORY_S = 0.25
#: A sleep between two looks, to which Linux adds its timer slack of 50 us: seconds.
_SLEEP_S = 2e-5
#: Seconds until a rank says that it waits.
NOTE_S = 30.0


class _Core(threading.local):
    """The core that this thread runs on, as its own yields have found it."""

    contended_until = 0.0


_CORE = _Core()


def is_contended() -> bool:
    """Whether another program has lately run on this thread's core while the thread waited."""
    return time.monotonic() < _CORE.contended_until


def give_way() -> None:
    """Lets other threads of the core run, between two looks at what this one waits for.

    A yield costs a microsecond where nothing else wants the core.  Where another program does, a
    yield lasts until that program has used up its time slice, some milliseconds, and a rank that
    polls uses up its own slice with nothing.  A rank that sleeps keeps its claim to the core and
    gets it back at once when it wakes, so contended cores are waited on by short sleeps.
    """
    began = time.monotonic()
    if began < _CORE.contended_until:
        time.sleep(_SLEEP_S)
        return
    os.sched_yield()
    ended = time.monotonic()
    if ended - began > _CONTENDED_S:
        _CORE.contended_until = ended + _MEMORY_S


def wait_for(is_over: Callable[[], bool], idle: Callable[[], object] | None = None) -> None:
    """Calls ``idle``, or gives way, until a condition holds.

    A rank that waits for long says so, once for each line of the program: where the ranks' calls
    differ, it waits for ever.
    """
    idle, late = idle or give_way, time.monotonic() + NOTE_S
    while not is_over():
        idle()
        if time.monotonic() > late:
            late = inf
            extras.say_waiting(NOTE_S)


class Polled:
    """A condition in the shape of a request, without a message: whoever waits looks at it."""

    __slots__ = ()

    def Test(self) -> bool:
        """Whether it is complete."""
        raise NotImplementedError

    def Wait(self) -> None:
        wait_for(self.Test)

    def Free(self) -> None:
        """Nothing to release."""
