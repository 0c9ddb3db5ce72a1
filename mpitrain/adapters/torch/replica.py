"""A loop of one's own over replicas, in the place of torch's DistributedDataParallel."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

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
from mpitrain.nn import Array

#: For the next one; those that share ranks have different ones, the same on all of their ranks.
_next_number = 0


class DataParallel(torch.nn.Module):
    """A replica of a module on each rank; ``backward()`` leaves means over the ranks in ``.grad``.

    A bucket of gradients is summed as soon as autograd has its last one, and ``backward()`` ends
    when all are done.  Several passes before a step add up as in one process, each with a sum of
    its own, or in :meth:`no_sync` without.

    Each forward pass in training (``module.training``, gradients enabled) begins with a word among
    the ranks: who is elsewhere in the program, or has other parameters than before, ends in an
    error on all ranks.  At the first, second, fourth, eighth ... and when the ranks have changed
    their parameters unequally often, parameters are compared bit by bit.  Parameters that were
    added, replaced, converted, frozen or unfrozen are noticed there, and broadcast.

    Attributes:
        module: as given.
    """

    def __init__(
        self,
        comm: Communicator,
        module: torch.nn.Module,
        *,
        bucket_bytes: int = 25 * 2**20,
        algorithm: str = "auto",
        overlap: bool = True,
        broadcast_buffers: bool = True,
    ) -> None:
        """Give all ranks rank 0's parameters and buffers, and bind the all-reduces; collective.

        Args:
            comm: the replicas; it is duplicated.
            module: on the CPU.
            bucket_bytes: least size of a bucket.
            algorithm: as ``comm.Allreduce_init`` takes it.
            overlap: start buckets while autograd goes on rather than all of them at the end.
            broadcast_buffers: give all ranks rank 0's buffers before each forward pass in training,
                as running statistics need it.

        Raises:
            TypeError: ``comm`` is no :class:`collectives.Communicator`.
            ValueError: on all ranks: no parameter needs a gradient, one is not on the CPU, or the
                ranks have different modules or options.
        """
        super().__init__()
        if not isinstance(comm, Communicator):
            raise TypeError(
                f"DataParallel needs a collectives.Communicator, not a {type(comm).__name__}: "
                "DataParallel(Communicator(comm), module)"
            )
        self.module = module
        self._comm = comm
        self._words = channel(comm)
        self._bucket_bytes, self._algorithm, self._overlap = bucket_bytes, algorithm, overlap
        self._broadcast_buffers = broadcast_buffers
        self._buckets: list[Bucket] = []
        self._hooks: list[Any] = []
        self._pass: Reference | None = None
        self._again: set[int] = set()
        self._synchronises = True
        self._pending = False
        self._forwards = 0
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

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """The module's outputs."""
        if torch.is_grad_enabled():
            # Within a backward pass it is a checkpoint that computes the same again.
            again = torch._C._current_graph_task_id() >= 0
            if self.module.training and not again:
                self._settle()
                if self._synchronises:
                    self._begin_step()
            self._pending = True
        return self.module(*inputs, **keywords)

    def reduce(self) -> None:
        """Average the gradients now; collective.

        ``backward()`` has done it already, and then this does nothing, unless it ran in
        :meth:`no_sync`, or reached no parameter of the module on this rank.
        """
        self._settle()
        if self._pending:
            self._average()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in it leave each rank its own gradients, for one that follows to add to
        and average, or :meth:`reduce`."""
        before, self._synchronises = self._synchronises, False
        try:
            yield
        finally:
            self._synchronises = before

    def close(self) -> None:
        """Free what is bound to the communicator; collective.  The module is one's own again."""
        if self._ended:
            return
        self._settle()
        self._meet(CLOSE)
        self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()

    def __getstate__(self) -> Any:
        raise TypeError("a DataParallel can be neither copied nor saved: copy or save its .module")

    def _bind(self) -> None:
        """Buckets for the parameters that there are; collective."""
        inventory = Inventory(self.module)
        options = dict(
            bucket_bytes=self._bucket_bytes,
            algorithm=self._algorithm,
            broadcast_buffers=self._broadcast_buffers,
        )
        inventory.check(self._words, options)
        self._inventory = inventory
        self._unbind()
        self._forwards = 0
        for bucket, members in enumerate(cut(self._inventory.trained, self._bucket_bytes)):
            self._buckets.append(Bucket(self._comm, members, self._algorithm))
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
            self._pending = True
            if not self._synchronises:
                return
            if not is_alive(self._pass):
                self._settle()
                self._pass = join(self._number, self._finish)
            own = self._buckets[bucket]
            own.missing.discard(index)
            if own.started:
                self._again.add(bucket)  # autograd came by it again after it had been copied
            elif self._overlap:
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
        self._forwards += 1
        if changed:
            self._bind()
            self._share_all()
        elif most != -least or self._forwards & (self._forwards - 1) == 0:
            self._inventory.compare(self._words, f"at forward pass {self._forwards}")
        if self._broadcast_buffers:
            share(self._words, list(self.module.buffers()))

    def _share_all(self) -> None:
        for tensor in [*self.module.parameters(), *self.module.buffers()]:
            share(self._words, [tensor])

    def _finish(self) -> None:
        """The end of a backward pass."""
        self._pass = None
        self._average()

    def _average(self) -> None:
        self._start(complete=False)
        late = [number in self._again for number in range(len(self._buckets))]
        known = [p.grad is not None for bucket in self._buckets for p in bucket.parameters]
        changed, incomplete = not self._inventory.holds(), any(late) or not all(known)
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
        self._pending = False

    def _fault(self) -> str:
        for name, parameter in self._inventory.parameters.items():
            if parameter.grad is not None and (why := refusal(parameter, parameter.grad)):
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
