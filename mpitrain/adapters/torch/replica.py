"""Replicas of a module in a user's own loop, as with torch's DistributedDataParallel."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from collectives import Algorithm, Communicator
from collectives.analysis.user_code import named
from mpitrain.adapters.torch.comm_hooks import Function, UnderWay
from mpitrain.adapters.torch.joining import JoiningReducer
from mpitrain.adapters.torch.reducer import Options
from mpitrain.adapters.torch.session import Join
from mpitrain.ranks.together import ClosedTogether


class DataParallel(ClosedTogether, torch.nn.Module):
    """A replica of a module on each rank; ``backward()`` leaves means over the ranks in ``.grad``.

    The sum of a bucket starts as soon as autograd has its last gradient, and ``backward()`` ends
    when all sums are complete.  Several passes before a step add up as in one process; each has a
    sum of its own, or none in :meth:`no_sync`.

    The ranks meet before each forward pass in training (``module.training``, gradients enabled): a
    rank that is elsewhere in the program, or has other parameters than before, is an error on all
    ranks.  Parameters are compared bit by bit at the first, second, fourth, eighth ... pass, and
    when the ranks have changed them unequally often.  Parameters that were added, replaced,
    converted, frozen or unfrozen are noticed there, and broadcast.

    Attributes:
        module: the module.
    """

    def __init__(
        self,
        comm: Communicator,
        module: torch.nn.Module,
        *,
        bucket_bytes: int = 25 * 2**20,
        algorithm: Algorithm | str = "auto",
        overlap: bool = True,
        broadcast_buffers: bool = True,
    ) -> None:
        """Give all ranks rank 0's parameters and buffers, and bind the all-reduces; collective.

        Args:
            comm: the replicas; it is duplicated.
            module: a module on the CPU, or with CuPy on this rank's GPU
                (``torch.cuda.set_device``).
            bucket_bytes: least size of a bucket.
            algorithm: argument of ``comm.Allreduce_init``.
            overlap: whether buckets start while autograd goes on rather than at its end.  The
                numbers are the same.
            broadcast_buffers: whether all ranks get rank 0's buffers before each forward pass in
                training, which running statistics need, and after each mean, for equal tests;
                otherwise each rank's buffers are its own, and may have other shapes.

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
        if overlap not in (True, False):
            raise ValueError(f"overlap is True or False, not {overlap!r}")
        options = Options(bucket_bytes, named(algorithm, "allreduce"), overlap, broadcast_buffers)
        self._reducer = JoiningReducer(comm, module, options)

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """The module's outputs."""
        if torch.is_grad_enabled():
            # Within a backward pass, a checkpoint repeats an earlier forward pass.
            again = torch._C._current_graph_task_id() >= 0
            if self.module.training and not again:
                self._reducer.begin_forward()
            self._reducer.state.pending = True
        return self.module(*inputs, **keywords)

    def reduce(self) -> None:
        """Average the gradients now; collective.

        It is needed after a ``backward()`` in :meth:`no_sync`, or one that reached no parameter of
        the module on this rank; otherwise it does nothing.
        """
        self._reducer.reduce()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in this block leave each rank its own gradients.

        A later ``backward()`` adds to them and averages, or :meth:`reduce` averages them.
        """
        reducer = self._reducer
        before, reducer.synchronises = reducer.synchronises, False
        try:
            yield
        finally:
            reducer.synchronises = before

    def weigh(self, samples: float) -> None:
        """Weigh this rank's gradients in the next mean by its number of samples; collective.

        Call it on all ranks before the ``backward()`` that averages, if the loss is a mean over the
        rank's own samples: ranks with unequal batches then get the gradients of one process.

            for inputs, labels in mine:
                net.weigh(len(inputs))
                criterion(net(inputs), labels).backward()

        Args:
            samples: size of the batch; 0: gradients do not count, and need not be numbers.

        Raises:
            RuntimeError: on all ranks: ``samples`` is no number of samples, or all are 0.
        """
        self._reducer.weigh(samples)

    def register_comm_hook(self, state: Any, hook: Function) -> None:
        """Let a hook sum the gradients, as torch's method of this name; collective.

        As soon as a bucket's gradients are there, ``hook(state, bucket)`` is called, in the same
        order on all ranks.  It returns a ``torch.futures.Future`` of the mean over the ranks: a
        tensor like ``bucket.buffer()``, or a list of it.  ``backward()`` ends when all futures are
        done.  The buffer holds this rank's gradients without a division (with :meth:`weigh`, times
        the number of ranks and the rank's weight in the mean).

            def bf16(state, bucket):
                small = bucket.buffer().to(torch.bfloat16).div_(size)
                return net.all_reduce(small).then(lambda f: f.value()[0].to(bucket.buffer().dtype))

        Args:
            state: the hook's first argument.
            hook: the hook, the same on all ranks.  If it raises an error on one, ``backward()``
                raises on all, and this object cannot be used any more; other ranks must not wait in
                a collective of the hook then, except in :meth:`all_reduce`.

        Raises:
            RuntimeError: on all ranks: it is no function, or there is a hook already.
            ValueError: on all ranks: they have different hooks.
        """
        self._reducer.register(state, hook)

    @property
    def under_way(self) -> tuple[Communicator, UnderWay]:
        """The ranks, and the sums that hooks have started."""
        buckets = self._reducer.buckets
        return buckets.comm, buckets.under_way

    def all_reduce(self, tensor: torch.Tensor) -> torch.futures.Future[list[torch.Tensor]]:
        """Start to sum a tensor over the ranks, in place, from within a hook; collective.

        Returns:
            A future of ``[tensor]``, as ``torch.distributed.all_reduce(...).get_future()``.  At the
            end of ``backward()``, or when the hook waits for a future, futures get their values and
            callbacks of ``then()`` are called, in the order in which the sums were started; so all
            ranks start later sums in one order.

        Raises:
            TypeError: it is no contiguous tensor of a type that can be summed.
        """
        return self._reducer.buckets.under_way.all_reduce(tensor)

    @contextmanager
    def join(
        self,
        *following: Any,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Iterator[None]:
        """A block in which ranks may have different numbers of batches; collective.

            with net.join(optimizer):
                for inputs, labels in mine:
                    ...

        A rank that leaves the block takes part in the others' means with gradients of 0, until all
        have left it.  Then all have the parameters, gradients and (``broadcast_buffers``) buffers
        of the rank that left last.

        Args:
            following: optimisers and schedulers (objects with ``state_dict``) that take over the
                state of the rank that left last.  An optimiser with a momentum must be among them.
            divide_by_initial_world_size: whether sums of gradients are divided by the number of all
                ranks, as in torch, or by that of the ranks that have a batch.  Neither holds after
                :meth:`weigh`.
            enable: whether the block does anything.
            throw_on_early_termination: whether to raise on all ranks as soon as one goes on after
                another has left.

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
        reducer.begin_join(join := Join(*flags, len(following)))
        try:
            yield
            root = reducer.attend(join)
        finally:
            reducer.leave_join()
        for one in following if root >= 0 else ():
            reducer.follow(one, root)

    def close(self) -> None:
        """Free what is bound to the communicator and to the module; collective.

        Raises:
            ReplicaMismatch: on all ranks: they have changed their parameters equally often, and end
                with different ones.
        """
        self._reducer.close()

    def __getstate__(self) -> Any:
        raise TypeError("a DataParallel can be neither copied nor saved: copy or save its .module")
