"""Gradients of replicas become means at the end of each backward pass."""

from collections.abc import Callable, Sequence
from numbers import Real
from time import perf_counter
from typing import Any, NamedTuple, NoReturn

import torch

from collectives import Communicator
from collectives.failure.abort import note_shared
from mpitrain.adapters.torch.buckets import Buckets
from mpitrain.adapters.torch.failing import HookErrors, HookFailed
from mpitrain.adapters.torch.gradients import refusal
from mpitrain.adapters.torch.hooks import Function, Hook, UnderWay
from mpitrain.adapters.torch.inventory import OTHER_PARAMETERS, SAME, Inventory, share
from mpitrain.adapters.torch.meeting import (
    AVERAGE,
    BEGIN,
    CLOSE,
    FORWARD,
    GIVE_UP,
    HOOK,
    WEIGH,
    Agreed,
    Parted,
    Refused,
    channel,
    largest,
    meet,
    total,
)
from mpitrain.adapters.torch.passes import Reference, is_alive, join
from mpitrain.adapters.torch.purity import is_due
from mpitrain.parallel.trial import Trial

#: For the next one; those that share ranks have different ones, the same on all of their ranks.
_next_number = 0


class Options(NamedTuple):
    """What all ranks must be given alike."""

    bucket_bytes: int
    algorithm: str
    overlap: bool | str
    broadcast_buffers: bool


#: Attribute of a gradient that is a mean: its version then, as torch counts changes.
_MEAN_AT = "_mpitrain_mean_at"


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
        self._module = module
        self._options = options
        self._words = channel(comm)
        self._errors = HookErrors(self._words)
        self._buckets = Buckets(comm, self._errors)
        self._pass: Reference | None = None
        self._part_of_mean: float | None = None
        self._joining = False  # ranks may run out of batches
        self._absent = False  # this one has
        self._divides_by_all = True
        self._unsummed = False
        self._onto_mean = False
        self._trial = Trial() if options.overlap == "auto" and comm.size > 1 else None
        self._begun: float | None = None
        self.synchronises = True
        self.pending = False
        self._forwards = 0
        self._verified = False
        self._ended = ""
        self._number = -1
        self._number = _agree_on_number(lambda n: int(self._meet(BEGIN, n).numbers[0]))
        # Gradients and words go apart, so that ranks which wait for other gradients meet in words.
        self._buckets = Buckets(comm.Dup(), self._errors)
        self._buckets.comm.watch()
        inventory = Inventory(module)
        fault = "" if inventory.trained else "no parameter needs a gradient"
        try:
            self._bind(inventory, fault)
        except ValueError:
            self._release()
            raise
        self._share([*module.parameters(), *module.buffers()])
        self._inventory = self._look()

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

    def weigh(self, samples: float) -> None:
        """The next mean is over samples, of which this rank has so many; collective.

        Raises:
            RuntimeError: on all ranks, if one gives no count, or nobody has a sample.
        """
        self._settle()
        known = isinstance(samples, Real) and 0 <= samples < float("inf")
        self._meet(WEIGH, fault="" if known else f"{samples!r} is no number of samples")
        of = total(self._words, samples, self._buckets.test)
        if not of:
            raise Refused("DataParallel: no rank has a sample in this batch")
        self._part_of_mean = samples / of

    def register(self, state: Any, function: Function) -> None:
        """Let a hook sum the buckets; collective.

        Raises:
            RuntimeError: on all ranks: it is none, or there is one already.
            ValueError: on all ranks: they have different ones.
        """
        self._settle()
        fault = "" if callable(function) else f"a communication hook is a function, not {function}"
        if self._buckets.hook:
            fault = "it has a communication hook already, and there can be one"
        self._meet(HOOK, fault=fault)
        name = getattr(function, "__qualname__", type(function).__qualname__)
        if len(names := dict.fromkeys(self._words.allgather(name))) > 1:
            raise ValueError(
                f"DataParallel: the ranks have different communication hooks: {', '.join(names)}"
            )
        self._buckets.register(Hook(function, state))

    def all_reduce(self, tensor: torch.Tensor) -> torch.futures.Future[list[torch.Tensor]]:
        """Start to sum a tensor over the ranks; collective."""
        return self._buckets.under_way.all_reduce(tensor)

    @property
    def under_way(self) -> tuple[Communicator, UnderWay]:
        """The ranks, and what hooks have started on them."""
        return self._buckets.comm, self._buckets.under_way

    def close(self) -> None:
        """Free what is bound; collective.

        Raises:
            ReplicaMismatch: on all ranks, which have changed their parameters equally often, and
                do not end with the same.
        """
        if self._ended:
            return
        self._settle()
        inventory, changes = self._inventory, self._inventory.changes()
        told, most, least = self._meet(CLOSE, inventory.differs, changes, -changes).numbers
        self._release()
        if not told and most == -least > 0:
            inventory.compare(self._words, "at the end")

    def _look(self) -> Inventory:
        return Inventory(self._module, has_buffers=self._options.broadcast_buffers)

    def _bind(self, inventory: Inventory, fault: str = "") -> None:
        """Buckets for the parameters that there are; collective."""
        inventory.check(self._words, self._options, fault)
        self._inventory = inventory
        self._forwards = 0
        options, trained = self._options, inventory.trained
        self._buckets.bind(trained, options.bucket_bytes, options.algorithm, self._arrived)

    def _release(self) -> None:
        self._ended = "it was closed"
        self._buckets.unbind()
        self._buckets.comm.Free()

    def _arrived(self, bucket: int, index: int, parameter: torch.Tensor) -> None:
        """Autograd has come by a parameter."""
        self.pending = True
        if self._joining and parameter.grad is not None:
            before = parameter.grad._version - 1
            self._onto_mean |= getattr(parameter.grad, _MEAN_AT, None) == before
        if not self.synchronises:
            self._unsummed = True
            return
        if not is_alive(self._pass):
            self._settle()
            self._pass = join(self._number, self._finish)
        self._buckets.note(bucket, index)
        if self.overlaps():
            self._buckets.start(self._part, complete=True)
        self._buckets.test()

    @property
    def _part(self) -> float | None:
        """Of the mean: this rank's."""
        return 0.0 if self._absent else self._part_of_mean

    def overlaps(self) -> bool:
        """Whether sums start while autograd goes on, in the present step."""
        return self._trial.overlap if self._trial else bool(self._options.overlap)

    def _try_overlap(self) -> None:
        """A step has ended; once enough have, the ranks agree on the better way; collective."""
        if not self._trial or self._joining or self._begun is None:
            return
        lasted, self._begun = self._clock() - self._begun, None
        if self._trial.tell(lasted):
            told = [int(1e9 * seconds) for seconds in self._trial.seconds]
            slowest = largest(self._words, told, self._buckets.test)
            self._trial.decide(*(slowest / 1e9).tolist())

    def _clock(self) -> float:
        """Seconds, when GPUs have done what was queued; for the first steps alone."""
        if any(parameter.is_cuda for parameter in self._inventory.trained):
            torch.cuda.synchronize()
        return perf_counter()

    def _begin_step(self) -> None:
        self._begun = self._clock() if self._trial else None
        changed, changes = self._inventory.change(), self._inventory.changes()
        self._go_forward(self._meet(FORWARD, changed, changes, -changes))
        self._verified = True

    def _go_forward(self, agreed: Agreed) -> None:
        changed, most, least = agreed.numbers
        self._forwards += 1
        if changed:
            self._take_over(agreed)
        if changed == OTHER_PARAMETERS:
            self._share_all()
        elif agreed.joined:
            pass  # those have older parameters, and take over the others' at the end
        elif most != -least or is_due(self._forwards):
            self._inventory.compare(self._words, f"at forward pass {self._forwards}")
        self._share_buffers(agreed)

    def _share_buffers(self, agreed: Agreed) -> None:
        if self._options.broadcast_buffers:
            share(self._words, list(self._module.buffers()), agreed.first)

    def _take_over(self, agreed: Agreed) -> None:
        """What the module consists of now, if it is the same on all ranks; collective."""
        self._check_unchanged(agreed)
        inventory = self._look()
        if agreed.numbers[0] == OTHER_PARAMETERS:
            self._bind(inventory)
            return
        try:
            inventory.check(self._words, self._options)
        except ValueError as error:
            raise ValueError(
                f"{error}, or leave buffers to each rank by broadcast_buffers=False"
            ) from None
        self._inventory = inventory

    def _check_unchanged(self, agreed: Agreed) -> None:
        if agreed.joined:
            raise Refused(
                "DataParallel: the module was changed while some ranks have no batch left; change "
                "it outside of join()"
            )

    def _share_all(self, root: int = 0) -> None:
        """Parameters, and buffers where they are not each rank's own."""
        buffers = self._module.buffers() if self._options.broadcast_buffers else ()
        self._share([*self._module.parameters(), *buffers], root)

    def _share(self, tensors: Sequence[torch.Tensor], root: int = 0) -> None:
        for tensor in tensors:
            share(self._words, [tensor], root)

    def _finish(self) -> None:
        """The end of a backward pass."""
        self._pass = None
        self._average()

    def _average(self) -> None:
        self._buckets.start(self._part, complete=False)
        late, known = self._buckets.late(), self._buckets.known()
        # Where the ranks met before the forward pass, they know the parameters already.
        look = self._inventory.change_of_buffers if self._verified else self._inventory.change
        changed = look()
        incomplete = any(late) or not all(known)
        onto = self._onto_mean
        agreed = self._meet(AVERAGE, changed, incomplete, onto, fault=self._fault())
        self._check_average(agreed)
        if agreed.numbers[0] != SAME:
            self._take_over(agreed)
        if agreed.numbers[0] == OTHER_PARAMETERS:  # the buckets are those of others
            self._inventory.compare(self._words, "at the end of backward()")
            return self._average()
        self._buckets.give_back(*self._complete_means(agreed, late, known))
        self.pending = self._verified = self._unsummed = False
        self._try_overlap()
        if self._joining:
            for gradient in (p.grad for p in self._inventory.trained):
                if gradient is not None:
                    setattr(gradient, _MEAN_AT, gradient._version)

    def _check_average(self, agreed: Agreed) -> None:
        """Raise on all ranks, those that have joined, too, if there is no such mean."""
        changed, _, onto_mean = agreed.numbers
        if changed:
            self._check_unchanged(agreed)
        by_ranks = agreed.joined and self._part_of_mean is None
        if onto_mean and by_ranks and self._divides_by_all:
            raise Refused(
                "DataParallel: some ranks have no batch left, and divide_by_initial_world_size "
                "would make gradients smaller that an earlier pass has averaged; accumulate in "
                "no_sync(), weigh() the batches, or join(divide_by_initial_world_size=False)"
            )

    def _complete_means(
        self, agreed: Agreed, late: list[bool], known: list[bool]
    ) -> tuple[list[bool], float]:
        """Sum what autograd came by again; what the forward pass did to buffers is rank 0's.

        Returns:
            Whether a rank has a gradient, for each parameter, and what the sums are to be
            multiplied by.
        """
        if agreed.numbers[1]:
            all_of = largest(self._words, [*late, *known], self._buckets.test).tolist()
            late, known = all_of[: len(late)], all_of[len(late) :]
        if self._buckets.sum_again(late, self._part):
            self._give_up()
        self._share_buffers(agreed)  # tests between steps go by them
        by_ranks = agreed.joined and self._part_of_mean is None
        self._part_of_mean, self._onto_mean = None, False
        if not by_ranks or self._divides_by_all:
            return known, 1.0
        return known, self._words.size / total(self._words, not self._absent, self._buckets.test)

    def _fault(self) -> str:
        for name, parameter in self._inventory.parameters.items():
            gradient = parameter.grad if parameter.requires_grad else None
            if gradient is not None and (why := refusal(parameter, gradient)):
                return f"{name}: {why}"
        return self._buckets.fault()

    def _settle(self) -> None:
        """After a backward pass that raised: what it has sent is received, and forgotten."""
        if self._ended:
            raise RuntimeError(f"this DataParallel cannot be used any more: {self._ended}")
        if self._pass is not None and not is_alive(self._pass):
            self._pass = None
            self._buckets.start(self._part, complete=False)
            self._meet(GIVE_UP)
            self._part_of_mean = None

    def _meet(self, doing: str, a: int = 0, b: int = 0, c: int = 0, fault: str = "") -> Agreed:
        """:func:`meet`, and the end of all sums that were started."""
        fault = self._errors.fault or fault
        try:
            with self._buckets.comm.waiting("allreduce of the replicas of a module"):
                agreed = meet(
                    self._words, doing, self._number, (a, b, c), fault, self._buckets.test
                )
        except Parted as error:
            self._ended = str(error)
            note_shared(self._words, error)
            raise
        except Refused as error:
            note_shared(self._words, error)
            if error.final:
                self._give_up()
            self._complete(error.doing)
            self._part_of_mean = None
            raise
        self._complete(agreed.doing)
        return agreed

    def _complete(self, doing: str) -> None:
        if self._absent and doing in (AVERAGE, GIVE_UP):
            self._buckets.start(self._part, complete=False)  # as all others have done before
        if self._buckets.finish():
            self._give_up()

    def _give_up(self) -> NoReturn:
        """Hooks of some ranks have failed; raise on all ranks."""
        self._ended = self._errors.told()
        raise self._errors.own or HookFailed(self._ended)


def _agree_on_number(most: Callable[[int], int]) -> int:
    """``most``: the largest over the ranks."""
    global _next_number
    number = most(_next_number)
    _next_number = number + 1
    return number
