"""The calls of torch's groups, recorded for the profile of a run."""

import sys
from collections.abc import Sequence
from functools import partial
from threading import main_thread
from time import perf_counter
from types import FrameType
from typing import Any

import torch
from mpi4py import MPI

from collectives.failure.abort import outside
from collectives.run.calls import Numbers
from collectives.run.profile import Profile
from collectives.run.record import CAME, WAITED, Recorder, Site
from collectives.run.world import at_end
from collectives.torch.backend import Calls, Group
from collectives.torch.devices import tensors_of
from collectives.torch.messages import MessageWork
from collectives.torch.order import CollectiveWork, Order
from collectives.torch.patches import hide_from_dynamo

#: Packages whose frames are not the program's.
_INSIDE = ("torch", "collectives")


def profile(file: str) -> None:
    """Profiles this run; collective.  ``file.html`` and ``file.json`` are written at its end."""
    watch = GroupWatch()
    at_end(MPI, [Profile(watch.recorder, file).finish])
    for kind, name, way in (
        (Calls, "__init__", watch.begin),
        (Calls, "_submit", watch.call),
        (Calls, "_message", watch.message),
        (Group, "monitored_barrier", watch.barrier),
        (CollectiveWork, "get_future", watch.future),
        (Order, "help", watch.wait),
        (MessageWork, "wait", watch.wait),
    ):
        setattr(kind, name, _before(getattr(kind, name), way))
    hide_from_dynamo(GroupWatch, Recorder, Numbers)


def _before(theirs: Any, way: Any) -> Any:
    def call(*given: Any, **named: Any) -> Any:
        return way(theirs, *given, **named)

    hide_from_dynamo(call)
    return call


class GroupWatch:
    """Ways to make calls, by which they are recorded: a blocking one where it is made, another one
    where it is made and where its rank waits for it.

    Calls of callbacks, which whoever waits may run, are part of the wait.
    """

    def __init__(self) -> None:
        self.recorder = Recorder()
        self._made: dict[tuple[int, ...], int] = {}
        self._backward: dict[int, list[Any]] = {}

    def begin(self, theirs: Any, group: Any, comm: Any, *given: Any) -> None:
        theirs(group, comm, *given)
        group.numbers = Numbers(comm, self._made)

    def call(
        self, theirs: Any, group: Any, what: str, value: Any, *given: Any, **named: Any
    ) -> Any:
        if group.order._is_callback():
            return theirs(group, what, value, *given, **named)
        begun, numbers = perf_counter(), [group.numbers.next()]
        work = theirs(group, what, value, *given, **named)
        is_later = isinstance(work, CollectiveWork)
        inputs = given[3] if len(given) > 3 else named.get("inputs")
        site = self._add(what, begun, numbers, CAME if is_later else CAME | WAITED)
        site.nbytes += _nbytes(value if inputs is None else inputs)
        if is_later:
            work.watched = what, lambda: numbers, site
        return work

    def message(self, theirs: Any, group: Any, what: str, tensors: Any, *given: Any) -> Any:
        begun, own, peer = perf_counter(), group._rank, given[1]
        work = made = theirs(group, what, tensors, *given)
        if isinstance(work, MessageWork):
            pair = (own, peer) if what == "send" else (peer, own)
            numbers = [] if peer == MPI.ANY_SOURCE else [group.numbers.next(*pair)]
            site = self._add(what, begun, numbers, CAME)
            site.nbytes += _nbytes(tensors)
            came = work._status
            of = lambda: numbers or [group.numbers.next(came.source, own)]  # noqa: E731
            made.watched = what, of, site
        return work

    def barrier(self, theirs: Any, group: Any, *given: Any, **named: Any) -> None:
        begun, numbers = perf_counter(), [group.numbers.next()]
        theirs(group, *given, **named)
        self._add("monitored_barrier", begun, numbers, CAME | WAITED)

    def wait(self, theirs: Any, *given: Any, **named: Any) -> Any:
        begun = perf_counter()
        found = theirs(*given, **named)
        self._waited(given, begun)
        return found

    def future(self, theirs: Any, work: Any) -> Any:
        """DDP's reducer takes futures in a backward pass, and waits at its end, in C++."""
        future, task = theirs(work), torch._C._current_graph_task_id()
        if task != -1 and not work.is_done:
            if task not in self._backward:
                self._backward[task] = []
                _later(self._end_of_backward, task)
            self._backward[task].append(work)
        return future

    def _end_of_backward(self, task: int) -> None:
        works = [work for work in self._backward.pop(task) if not work.is_done]
        _later(self._waited, works, perf_counter())  # behind the reducer's

    def _waited(self, works: Sequence[Any], begun: float) -> None:
        """A wait for works has ended; it is part of the call if that was made at its site."""
        watched = [vars(work).pop("watched") for work in works if hasattr(work, "watched")]
        if watched:
            what, _, made = watched[-1]
            numbers = [number for _, of, _ in watched for number in of()]
            site = self._add(what, begun, numbers, WAITED)
            site.calls -= site is made

    def _add(self, what: str, begun: float, numbers: list[int], role: int) -> Site:
        """Records a call at the line of the program; in a thread of autograd's own, at that where
        the main thread is."""
        own = sys._getframe(2)
        where = outside(own, _INSIDE) or outside(self._main(), _INSIDE) or own
        return self.recorder.add(where, what, begun, numbers, role)

    def _main(self) -> FrameType | None:
        return sys._current_frames().get(main_thread().ident or 0)


def _nbytes(values: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(values))


def _later(function: Any, *given: Any) -> None:
    """Lets autograd call this at the end of the backward pass that runs, behind earlier ones."""
    torch.autograd.Variable._execution_engine.queue_callback(partial(function, *given))
