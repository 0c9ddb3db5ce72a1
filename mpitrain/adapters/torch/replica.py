"""A loop of one's own over replicas, in the place of torch's DistributedDataParallel."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch

from collectives import Algorithm, Communicator
from collectives.analysis.user_code import named
from mpitrain.adapters.torch.hooks import Function, UnderWay
from mpitrain.adapters.torch.joining import Join, JoiningReducer
from mpitrain.adapters.torch.reducer import Options
from mpitrain.ranks.together import ClosedTogether


class DataParallel(ClosedTogether, torch.nn.Module):
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
        algorithm: Algorithm | str = "auto",
        overlap: bool | Literal["auto"] = True,
        broadcast_buffers: bool = True,
    ) -> None:
        """Give all ranks rank 0's parameters and buffers, and bind the all-reduces; collective.

        Args:
            comm: the replicas; it is duplicated.
            module: on the CPU, or with CuPy on this rank's GPU (``torch.cuda.set_device``).
            bucket_bytes: least size of a bucket.
            algorithm: as ``comm.Allreduce_init`` takes it.
            overlap: start buckets while autograd goes on rather than all of them at the end;
                ``"auto"`` times the first twelve steps both ways, and keeps the way that is faster
                on the slowest rank (:attr:`overlaps` says which).  The numbers are the same.
            broadcast_buffers: give all ranks rank 0's buffers before each forward pass in training,
                as running statistics need it, and after each mean, so that all test alike; without
                it, each rank's are its own after the beginning, and may have other shapes.

        Raises:
            TypeError: ``comm`` is no :class:`collectives.Communicator`.
            ValueError: on all ranks: no parameter needs a gradient, one lies elsewhere, or the
                ranks have different modules or options.
        """
        super().__init__()
        if not isinstance(comm, Communicator):
            raise TypeError(
                f"DataParallel needs a collectives.Communicator, not a {type(comm).__name__}: "
                "DataParallel(Communicator(comm), module)"
            )
        self.module = module
        if overlap not in (True, False, "auto"):
            raise ValueError(f"overlap is True, False or 'auto', not {overlap!r}")
        options = Options(bucket_bytes, named(algorithm, "allreduce"), overlap, broadcast_buffers)
        self._reducer = JoiningReducer(comm, module, options)

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """The module's outputs."""
        if torch.is_grad_enabled():
            # Within a backward pass it is a checkpoint that computes the same again.
            again = torch._C._current_graph_task_id() >= 0
            if self.module.training and not again:
                self._reducer.begin_forward()
            self._reducer.pending = True
        return self.module(*inputs, **keywords)

    @property
    def overlaps(self) -> bool:
        """Whether sums start while autograd goes on, in the present step."""
        return self._reducer.overlaps()

    def reduce(self) -> None:
        """Average the gradients now; collective.

        ``backward()`` has done it already, and then this does nothing, unless it ran in
        :meth:`no_sync`, or reached no parameter of the module on this rank.
        """
        self._reducer.reduce()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in it leave each rank its own gradients, for one that follows to add to
        and average, or :meth:`reduce`."""
        reducer = self._reducer
        before, reducer.synchronises = reducer.synchronises, False
        try:
            yield
        finally:
            reducer.synchronises = before

    def weigh(self, samples: float) -> None:
        """The next mean is over samples, of which this rank's batch has so many; collective.

        Before the ``backward()`` that averages, on all ranks, for a loss that is the mean over the
        rank's own samples: ranks with unequal batches then end with one process's gradients.

            for inputs, labels in mine:
                net.weigh(len(inputs))
                criterion(net(inputs), labels).backward()

        Args:
            samples: 0 of a rank whose gradients do not count, and need not be numbers.

        Raises:
            RuntimeError: on all ranks, if ``samples`` is no number of samples, or all are 0.
        """
        self._reducer.weigh(samples)

    def register_comm_hook(self, state: Any, hook: Function) -> None:
        """Sum the gradients in one's own way, as torch's method of this name; collective.

        As soon as a bucket's gradients are there, ``hook(state, bucket)`` is called, in the same
        order on all ranks.  It starts whatever it likes and returns a ``torch.futures.Future``
        whose value is the mean over the ranks: a tensor like ``bucket.buffer()``, or a list of it.
        ``backward()`` ends when all are done.  The buffer holds this rank's gradients, divided by
        nothing (with :meth:`weigh`, times the ranks and its part of the mean).

            def bf16(state, bucket):
                small = bucket.buffer().to(torch.bfloat16).div_(size)
                return net.all_reduce(small).then(lambda f: f.value()[0].to(bucket.buffer().dtype))

        Args:
            state: the hook's first argument.
            hook: the same on all ranks.  What it raises on one, ``backward()`` raises on all, and
                this object has come to its end; it must not be in a collective then that others
                wait in, but for :meth:`all_reduce`.

        Raises:
            RuntimeError: on all ranks: it is no function, or there is a hook already.
            ValueError: on all ranks: they have different hooks.
        """
        self._reducer.register(state, hook)

    @property
    def under_way(self) -> tuple[Communicator, UnderWay]:
        """For hooks: the ranks, and what was started on them."""
        return self._reducer.under_way

    def all_reduce(self, tensor: torch.Tensor) -> torch.futures.Future[list[torch.Tensor]]:
        """Start to sum a tensor over the ranks, in place, from within a hook; collective.

        Returns:
            A future of ``[tensor]``, as ``torch.distributed.all_reduce(...).get_future()`` is.  The
            sum goes on while ``backward()`` does; at its end, or when the hook waits for a future,
            futures get their values and what ``then()`` was given is called, in the order in which
            the sums were started, so that all ranks start in one order what follows.

        Raises:
            TypeError: it is no contiguous tensor of a type that can be summed.
        """
        return self._reducer.all_reduce(tensor)

    @contextmanager
    def join(
        self,
        *following: Any,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Iterator[None]:
        """Ranks may have unequally many batches in it; collective.

            with net.join(optimizer):
                for inputs, labels in mine:
                    ...

        A rank that leaves the block takes part, with gradients of 0, in what the others do, until
        all have left it.  Then all have the parameters, gradients and (``broadcast_buffers``)
        buffers of the rank that left last.

        Args:
            following: optimisers, schedulers, whatever has ``state_dict``: they take over the state
                of the rank that left last.  An optimiser with a momentum must be among them.
            divide_by_initial_world_size: sums of gradients are divided by the number of all ranks,
                as in torch, or else by that of the ranks that have a batch.  :meth:`weigh`, which
                makes means over samples, goes before either.
            enable: else the block does nothing.
            throw_on_early_termination: raise on all ranks as soon as one goes on after another has
                left.

        Raises:
            TypeError: a ``following`` has no ``state_dict``.
            ValueError: on all ranks, if they are given different arguments.
            RuntimeError: on all ranks: see ``throw_on_early_termination``; a rank leaves with
                gradients that no mean has; the module changes.
        """
        for one in following:
            if not hasattr(one, "state_dict") or not hasattr(one, "load_state_dict"):
                raise TypeError(
                    f"join() takes optimisers and schedulers, not {one!r}; other arguments by name"
                )
        if not enable:
            yield
            return
        reducer = self._reducer
        flags = bool(divide_by_initial_world_size), bool(throw_on_early_termination)
        reducer.begin_join(Join(*flags, len(following)))
        try:
            yield
            root = reducer.attend()
        finally:
            reducer.leave_join()
        for one in following if root >= 0 else ():
            reducer.follow(one, root)

    def close(self) -> None:
        """Free what is bound to the communicator; collective.  The module is one's own again.

        Raises:
            ReplicaMismatch: on all ranks: they have changed their parameters equally often, and
                have others now.
        """
        self._reducer.close()

    def __getstate__(self) -> Any:
        raise TypeError("a DataParallel can be neither copied nor saved: copy or save its .module")
