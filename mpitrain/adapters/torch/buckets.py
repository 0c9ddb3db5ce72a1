"""Buckets of a module's gradients: copied in, summed over the ranks, copied back."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal

import torch
from mpi4py import MPI

from collectives import Communicator
from mpitrain.adapters.torch.arrays import as_array, as_tensor
from mpitrain.adapters.torch.comm_hooks import GradBucket, Hook, HookErrors, UnderWay, mean_of


def refusal(parameter: torch.nn.Parameter, gradient: torch.Tensor) -> str:
    """Why a gradient cannot be averaged; empty if it can."""
    if gradient.requires_grad:
        return (
            "its gradient has a graph of its own: backward(create_graph=True) would differentiate "
            "one rank's part of the mean alone; use torch.autograd.grad"
        )
    if gradient.layout != torch.strided:
        return "its gradient is sparse: make the layer with sparse=False"
    for of in ("dtype", "device", "shape"):
        given, needed = getattr(gradient, of), getattr(parameter, of)
        if given != needed:
            return f"its gradient has {of} {given}, and it has {needed}"
    return ""


def memory_of(parameter: torch.nn.Parameter) -> Literal["numpy", "cupy"]:
    """Kind of memory of gradients, for ``Communicator.empty``."""
    return "cupy" if parameter.is_cuda else "numpy"


class GradientBucket(GradBucket):
    """Gradients of some parameters of one type and device, and their all-reduce.

    They lie in memory of their own: autograd, the optimiser and the caller may change ``.grad`` at
    any time without changing a message.  On a GPU, copies and sums are queued behind the work of
    torch's current stream, which goes on behind them.

    Attributes:
        missing: indices of those without a gradient so far in this backward pass.
        started: whether the sum was started.
    """

    def __init__(
        self,
        comm: Communicator,
        parameters: Sequence[torch.nn.Parameter],
        algorithm: str,
        under_way: UnderWay,
        number: tuple[int, int] = (0, 1),
    ) -> None:
        """Bind ``comm.Allreduce_init`` with this ``algorithm``; collective.

        ``under_way`` has the sums that hooks have started; ``number`` is the number of this bucket,
        and of all buckets.
        """
        first, size = parameters[0], sum(p.numel() for p in parameters)
        kind = as_array(torch.empty(0, dtype=first.dtype)).dtype
        memory = comm.empty(size, kind, memory=memory_of(first))
        super().__init__(number, as_tensor(memory), tuple(parameters))
        self._under_way = under_way
        self._future: torch.futures.Future[Any] | None = None
        self._ranks = comm.size
        self._plan = comm.Allreduce_init(MPI.IN_PLACE, memory, algorithm=algorithm)
        self._reset()

    def _reset(self) -> None:
        self.missing = set(range(len(self._parameters)))
        self.started = False

    @torch.no_grad()
    def start(self, weight: float | None = None, hook: Hook | None = None) -> None:
        """Copy the gradients in, each times this rank's weight in the mean, and start their sum.

        A hook makes the mean itself: its gradients are larger by the number of ranks.

        Args:
            weight: weight of this rank; None for equal weights; 0 on a rank without samples, whose
                gradients need not be numbers.
            hook: communication hook that sums the gradients instead.
        """
        for part, parameter in zip(self._gradients, self._parameters, strict=True):
            gradient = parameter.grad
            if (
                weight == 0
                or gradient is None
                or part.shape != gradient.shape
                or refusal(parameter, gradient)
            ):
                part.zero_()
            elif weight is None and hook:
                part.copy_(gradient)
            elif weight is None:
                torch.div(gradient, self._ranks, out=part)
            else:
                torch.mul(gradient, weight * (self._ranks if hook else 1), out=part)
        self.started = True
        if hook:
            self._future = hook.start(self)
        else:
            self._plan.Start()

    def test(self) -> None:
        """Move the sum along."""
        if self._future:
            self._under_way.test()
        elif self.started:
            self._plan.Test()

    @torch.no_grad()
    def finish(self) -> None:
        """Complete the sum; then the next pass may begin."""
        if self._future:
            found = mean_of(self._under_way.wait(self._future), self._buffer)
            self._future = None
            if found.data_ptr() != self._buffer.data_ptr():
                self._buffer.copy_(found)
        elif self.started:
            self._plan.Wait()
        self._reset()

    @torch.no_grad()
    def give_back(self, wanted: Iterator[int], factor: float = 1.0) -> None:
        """Write the sum times ``factor`` into each gradient that is wanted."""
        for part, parameter, known in zip(self._gradients, self._parameters, wanted):
            if not known:
                continue
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter, requires_grad=False)
            parameter.grad.copy_(part if factor == 1.0 else part.mul_(factor))

    def free(self) -> None:
        """Release the all-reduce."""
        self._plan.Free()


class GradientBuckets:
    """All buckets of a module, whose sums start in one order on all ranks.

    Attributes:
        comm: the ranks.
        under_way: sums that communication hooks have started.
        hook: communication hook that sums the gradients instead.
    """

    def __init__(self, comm: Communicator, errors: HookErrors) -> None:
        """``errors`` keeps the errors of hooks until the ranks meet."""
        self.comm = comm
        self.under_way = UnderWay(comm, errors.expect_none)
        self.hook: Hook | None = None
        self._errors = errors
        self._buckets: list[GradientBucket] = []
        self._watches: list[Any] = []
        self._again: set[int] = set()

    def bind(
        self,
        trained: Sequence[torch.nn.Parameter],
        bucket_bytes: int,
        algorithm: str,
        arrived: Callable[[int, int, torch.Tensor], None],
    ) -> None:
        """Make buckets for these parameters, in the place of earlier ones; collective.

        A bucket has at least ``bucket_bytes``.  ``arrived`` is called when autograd has accumulated
        a gradient, with the number of the bucket, the index in the bucket, and the parameter.
        """
        self.unbind()
        parts = _cut(trained, bucket_bytes)
        for bucket, members in enumerate(parts):
            number = bucket, len(parts)
            self._buckets.append(
                GradientBucket(self.comm, members, algorithm, self.under_way, number)
            )
            self._watches += [
                parameter.register_post_accumulate_grad_hook(partial(arrived, bucket, index))
                for index, parameter in enumerate(members)
            ]

    def unbind(self) -> None:
        """Let go of the parameters."""
        for watch in self._watches:
            watch.remove()
        for bucket in self._buckets:
            bucket.free()
        self._watches, self._buckets = [], []

    def note(self, bucket: int, index: int) -> None:
        """Autograd has accumulated a gradient."""
        own = self._buckets[bucket]
        own.missing.discard(index)
        if own.started:
            self._again.add(bucket)  # autograd came by it again after it had been copied

    def start(self, weight: float | None, *, complete: bool) -> None:
        """Start sums, in the same order on all ranks, whatever the order of autograd.

        ``weight`` is this rank's weight in the mean (:meth:`GradientBucket.start`).  With
        ``complete``, stop at the first bucket that misses a gradient.
        """
        for bucket in self._buckets:
            if complete and bucket.missing:
                return
            if not bucket.started:
                self._start(bucket, weight)

    def _start(self, bucket: GradientBucket, weight: float | None) -> None:
        if not self.hook:
            bucket.start(weight)
        elif not self._errors.own:
            with self._errors.kept():
                bucket.start(weight, self.hook)

    def test(self) -> None:
        """Move the sums along."""
        for bucket in self._buckets:
            bucket.test()

    def finish(self) -> bool:
        """Complete all sums that were started; returns whether a rank's hook has failed."""
        failed = self._finish(self._buckets)
        self._again.clear()
        return failed

    def sum_again(self, late: Sequence[bool], weight: float | None) -> bool:
        """Sum the buckets that are late on a rank once more; whether a rank's hook has failed."""
        again = [bucket for bucket, is_late in zip(self._buckets, late, strict=True) if is_late]
        for bucket in again:
            self._start(bucket, weight)
        return self._finish(again)

    def _finish(self, buckets: Sequence[GradientBucket]) -> bool:
        # Sums have been started on all ranks or on none.
        if not self.hook or not any(bucket.started for bucket in buckets):
            for bucket in buckets:
                bucket.finish()
            return False
        with self.comm.waiting("what communication hooks have started"):
            if not self._errors.own:
                with self._errors.kept():
                    for bucket in buckets:
                        bucket.finish()
            return self._errors.on_any_rank()

    def late(self) -> list[bool]:
        """Whether each bucket has got a gradient again after its sum was started."""
        return [number in self._again for number in range(len(self._buckets))]

    def known(self) -> list[bool]:
        """Whether this rank has a gradient, for each parameter."""
        return [p.grad is not None for bucket in self._buckets for p in bucket.parameters()]

    def give_back(self, known: Sequence[bool], factor: float) -> None:
        """Write the sums times ``factor`` into the gradients that any rank has."""
        wanted = iter(known)
        for bucket in self._buckets:
            bucket.give_back(wanted, factor)

    def fault(self) -> str:
        """Why there is no mean; empty if there is one."""
        for bucket in self._buckets:
            for index, parameter in enumerate(bucket.parameters()):
                if parameter.grad is None and index not in bucket.missing:
                    return (
                        "a gradient was taken away before backward() had ended and averaged it, "
                        "as optimisers in hooks do; step after backward()"
                    )
        return ""


def _cut(parameters: Sequence[torch.nn.Parameter], least: int) -> list[list[torch.nn.Parameter]]:
    """Parameters in buckets of one type and device, of at least ``least`` bytes but for the last.

    They come in the usual order of autograd: last ones first.
    """
    found: list[list[torch.nn.Parameter]] = []
    filling: dict[tuple[torch.dtype, torch.device], list[torch.nn.Parameter]] = {}
    for parameter in reversed(parameters):
        kind = parameter.dtype, parameter.device
        bucket = filling.setdefault(kind, [])
        if not bucket:
            found.append(bucket)
        bucket.append(parameter)
        if sum(p.numel() * p.element_size() for p in bucket) >= least:
            del filling[kind]
    return found
