"""The buckets of a module's gradients: sums that start in the same order on all ranks."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from collectives import Communicator
from mpitrain.adapters.torch.comm_hooks import Hook, UnderWay
from mpitrain.adapters.torch.failing import HookErrors
from mpitrain.adapters.torch.gradients import Bucket, cut


class Buckets:
    """Sums of gradients, which start while autograd goes on, or at its end.

    What a communication hook raises is kept in ``errors`` until the ranks meet.

    Attributes:
        comm: the ranks.
        under_way: what communication hooks have started.
        hook: sums the gradients instead, if there is one.
    """

    def __init__(self, comm: Communicator, errors: HookErrors) -> None:
        self.comm = comm
        self.under_way = UnderWay(comm, errors.expect_none)
        self.hook: Hook | None = None
        self._errors = errors
        self._buckets: list[Bucket] = []
        self._watches: list[Any] = []
        self._again: set[int] = set()

    def bind(
        self,
        trained: Sequence[torch.nn.Parameter],
        bucket_bytes: int,
        algorithm: str,
        arrived: Callable[[int, int, torch.Tensor], None],
    ) -> None:
        """Buckets for these parameters, in the place of others; collective.

        Args:
            arrived: called when autograd has come by a parameter, with its bucket's number, its
                own in there, and it.
        """
        self.unbind()
        parts = cut(trained, bucket_bytes)
        for bucket, members in enumerate(parts):
            number = bucket, len(parts)
            self._buckets.append(Bucket(self.comm, members, algorithm, self.under_way, number))
            self._buckets[-1].hook = self.hook
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

    def register(self, hook: Hook) -> None:
        """From now on, it sums the gradients."""
        self.hook = hook
        for bucket in self._buckets:
            bucket.hook = hook

    def note(self, bucket: int, index: int) -> None:
        """Autograd has come by a parameter."""
        own = self._buckets[bucket]
        own.missing.discard(index)
        if own.started:
            self._again.add(bucket)  # autograd came by it again after it had been copied

    def start(self, part_of_mean: float | None, *, complete: bool) -> None:
        """In the same order on all ranks, whatever the order in which autograd comes by them.

        Args:
            part_of_mean: this rank's, as :meth:`Bucket.start` takes it.
            complete: up to the first that misses a gradient.
        """
        for bucket in self._buckets:
            if complete and bucket.missing:
                return
            if not bucket.started:
                self._start(bucket, part_of_mean)

    def _start(self, bucket: Bucket, part_of_mean: float | None) -> None:
        if not self.hook:
            bucket.start(part_of_mean)
        elif not self._errors.own:
            with self._errors.kept():  # until the ranks meet
                bucket.start(part_of_mean)

    def test(self) -> None:
        """Let the sums make progress."""
        for bucket in self._buckets:
            bucket.test()

    def finish(self) -> bool:
        """Until all sums that were started are done; whether a rank's hook has failed."""
        failed = self._finish(self._buckets)
        self._again.clear()
        return failed

    def sum_again(self, late: Sequence[bool], part_of_mean: float | None) -> bool:
        """Sum those that are late on a rank once more; whether a rank's hook has failed."""
        again = [bucket for bucket, is_late in zip(self._buckets, late, strict=True) if is_late]
        for bucket in again:
            self._start(bucket, part_of_mean)
        return self._finish(again)

    def _finish(self, buckets: Sequence[Bucket]) -> bool:
        def finish() -> None:
            for bucket in buckets:
                bucket.finish()

        # Sums have been started on all ranks or on none.
        if not self.hook or not any(bucket.started for bucket in buckets):
            finish()
            return False
        with self.comm.waiting("what communication hooks have started"):
            if not self._errors.own:
                with self._errors.kept():
                    finish()
            return self._errors.agree(self.test)

    def late(self) -> list[bool]:
        """Whether autograd has come by each bucket again after its sum was started."""
        return [number in self._again for number in range(len(self._buckets))]

    def known(self) -> list[bool]:
        """Whether this rank has a gradient, for each parameter."""
        return [p.grad is not None for bucket in self._buckets for p in bucket.parameters]

    def give_back(self, known: Sequence[bool], factor: float) -> None:
        """The gradients that any rank has become the sums times ``factor``."""
        wanted = iter(known)
        for bucket in self._buckets:
            bucket.give_back(wanted, factor)

    def fault(self) -> str:
        """Why there is no mean, if there is none."""
        for bucket in self._buckets:
            for index, parameter in enumerate(bucket.parameters):
                if parameter.grad is None and index not in bucket.missing:
                    return (
                        "a gradient was taken away before backward() had ended and averaged it, "
                        "as optimisers in hooks do; step after backward()"
                    )
        return ""
