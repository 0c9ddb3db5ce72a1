"""Gradients of replicas become means at the end of each backward pass."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from collectives import Communicator
from mpitrain.adapters.torch.gradients import Bucket, cut, refusal
from mpitrain.adapters.torch.inventory import Inventory, share
from mpitrain.adapters.torch.meeting import (
    AVERAGE,
    BEGIN,
    CLOSE,
    FORWARD,
    GIVE_UP,
    Parted,
    Refused,
    channel,
    largest,
    meet,
)
from mpitrain.adapters.torch.passes import Reference, is_alive, join
from mpitrain.arrays import Array

#: For the next one; those that share ranks have different ones, the same on all of their ranks.
_next_number = 0


class Options(NamedTuple):
    """What all ranks must be given alike."""

    bucket_bytes: int
    algorithm: str
    overlap: bool
    broadcast_buffers: bool


class Reducer:
    """Watches autograd come by the parameters of a module, and sums their gradients.

    Attributes:
        synchronises: backward passes end with a mean.
        pending: there may be gradients that are no means yet.
    """

    def __init__(self, comm: Communicator, module: torch.nn.Module, options: Options) -> None:
        """Give all ranks rank 0's parameters and buffers, and bind the all-reduces; collective.

        Raises:
            ValueError: on all ranks, if these cannot be replicas.
        """
        self._comm = comm
        self._module = module
        self._options = options
        self._words = channel(comm)
        self._buckets: list[Bucket] = []
        self._hooks: list[Any] = []
        self._pass: Reference | None = None
        self._again: set[int] = set()
        self.synchronises = True
        self.pending = False
        self._forwards = 0
        self._verified = False
        self._ended = ""
        self._number = -1
        self._number = _agree_on_number(lambda n: self._meet(BEGIN, n)[0])
        # Gradients and words go apart, so that ranks which wait for other gradients meet in words.
        self._comm = comm.Dup()
        try:
            self._bind()
        except ValueError:
            self._release()
            raise
        self._share_all()

    def begin_forward(self) -> None:
        """Before a forward pass in training."""
        self._settle()
        if self.synchronises:
            self._begin_step()

    def reduce(self) -> None:
        """Average what is no mean yet; collective."""
        self._settle()
        if self.pending:
            self._average()

    def close(self) -> None:
        """Free what is bound; collective."""
        if self._ended:
            return
        self._settle()
        self._meet(CLOSE)
        self._release()

    def _bind(self) -> None:
        """Buckets for the parameters that there are; collective."""
        inventory = Inventory(self._module)
        inventory.check(self._words, self._options)
        self._inventory = inventory
        self._unbind()
        self._forwards = 0
        for bucket, members in enumerate(cut(self._inventory.trained, self._options.bucket_bytes)):
            self._buckets.append(Bucket(self._comm, members, self._options.algorithm))
            self._hooks += [
                parameter.register_post_accumulate_grad_hook(self._hook(bucket, index))
                for index, parameter in enumerate(members)
            ]

    def _unbind(self) -> None:
        for hook in self._hooks:
            hook.remove()
        for bucket in self._buckets:
            bucket.free()
        self._hooks, self._buckets = [], []

    def _release(self) -> None:
        self._ended = "it was closed"
        self._unbind()
        self._comm.Free()

    def _hook(self, bucket: int, index: int) -> Callable[[torch.Tensor], None]:
        def ready(parameter: torch.Tensor) -> None:
            self.pending = True
            if not self.synchronises:
                return
            if not is_alive(self._pass):
                self._settle()
                self._pass = join(self._number, self._finish)
            own = self._buckets[bucket]
            own.missing.discard(index)
            if own.started:
                self._again.add(bucket)  # autograd came by it again after it had been copied
            elif self._options.overlap:
                self._start(complete=True)
            self._test()

        return ready

    def _start(self, *, complete: bool) -> None:
        """In the same order on all ranks, whatever the order in which autograd comes by them."""
        for bucket in self._buckets:
            if complete and bucket.missing:
                return
            if not bucket.started:
                bucket.start()

    def _test(self) -> None:
        for bucket in self._buckets:
            bucket.test()

    def _begin_step(self) -> None:
        changed, changes = not self._inventory.holds(), self._inventory.changes()
        changed, most, least = self._meet(FORWARD, changed, changes, -changes)
        self._verified = True
        self._forwards += 1
        if changed:
            self._bind()
            self._share_all()
        elif most != -least or self._forwards & (self._forwards - 1) == 0:
            self._inventory.compare(self._words, f"at forward pass {self._forwards}")
        if self._options.broadcast_buffers:
            share(self._words, list(self._module.buffers()))

    def _share_all(self) -> None:
        for tensor in [*self._module.parameters(), *self._module.buffers()]:
            share(self._words, [tensor])

    def _finish(self) -> None:
        """The end of a backward pass."""
        self._pass = None
        self._average()

    def _average(self) -> None:
        self._start(complete=False)
        late = [number in self._again for number in range(len(self._buckets))]
        known = [p.grad is not None for bucket in self._buckets for p in bucket.parameters]
        # Where the ranks met before the forward pass, they know it already.
        changed = not self._verified and not self._inventory.holds()
        incomplete = any(late) or not all(known)
        changed, incomplete, _ = self._meet(AVERAGE, changed, incomplete, fault=self._fault())
        if changed:  # the buckets are those of other parameters
            self._bind()
            self._inventory.compare(self._words, "at the end of backward()")
            return self._average()
        if incomplete:
            agreed = largest(self._words, [*late, *known], self._test)
            late, known = agreed[: len(late)].tolist(), agreed[len(late) :].tolist()
        for bucket, again in zip(self._buckets, late):
            if again:
                bucket.start()
                bucket.finish()
        wanted = iter(known)
        for bucket in self._buckets:
            bucket.give_back(wanted)
        self.pending = self._verified = False

    def _fault(self) -> str:
        for name, parameter in self._inventory.parameters.items():
            gradient = parameter.grad if parameter.requires_grad else None
            if gradient is not None and (why := refusal(parameter, gradient)):
                return f"{name}: {why}"
        for bucket in self._buckets:
            for index, parameter in enumerate(bucket.parameters):
                if parameter.grad is None and index not in bucket.missing:
                    return (
                        "a gradient was taken away before backward() had ended and averaged it, "
                        "as optimisers in hooks do; step after backward()"
                    )
        return ""

    def _settle(self) -> None:
        """After a backward pass that raised: what it has sent is received, and forgotten."""
        if self._ended:
            raise RuntimeError(f"this DataParallel cannot be used any more: {self._ended}")
        if self._pass is not None and not is_alive(self._pass):
            self._pass = None
            self._start(complete=False)
            self._meet(GIVE_UP)

    def _meet(self, doing: str, a: int = 0, b: int = 0, c: int = 0, fault: str = "") -> Array:
        """:func:`meet`, and the end of all sums that were started."""
        try:
            with self._comm.waiting("the replicas of a module"):
                agreed = meet(self._words, doing, self._number, (a, b, c), fault, self._test)
        except Parted as error:
            self._ended = str(error)
            raise
        except Refused:
            self._complete()
            raise
        self._complete()
        return agreed

    def _complete(self) -> None:
        for bucket in self._buckets:
            bucket.finish()
        self._again.clear()


def _agree_on_number(most: Callable[[int], int]) -> int:
    """``most``: the largest over the ranks."""
    global _next_number
    number = most(_next_number)
    _next_number = number + 1
    return number
