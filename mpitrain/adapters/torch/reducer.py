"""Gradients of replicas become means at the end of each backward pass."""

from numbers import Real
from typing import Any, NamedTuple

import torch

from collectives import Communicator
from mpitrain.adapters.torch.buckets import refusal
from mpitrain.adapters.torch.checks.probe import is_due
from mpitrain.adapters.torch.comm_hooks import Function, Hook
from mpitrain.adapters.torch.inventory import OTHER_PARAMETERS, SAME, Inventory
from mpitrain.adapters.torch.rendezvous import (
    AVERAGE,
    CLOSE,
    FORWARD,
    HOOK,
    WEIGH,
    Meeting,
    Refused,
)
from mpitrain.adapters.torch.session import BackwardPass, GradientState, Session, is_alive

#: Attribute of a gradient that is a mean: its version then, as torch counts changes.
_MEAN_AT = "_mpitrain_mean_at"


class Options(NamedTuple):
    """Options that all ranks must be given alike."""

    bucket_bytes: int
    algorithm: str
    overlap: bool
    broadcast_buffers: bool


class Reducer(Session):
    """Watches autograd accumulate gradients of a module's parameters, and averages them.

    Attributes:
        synchronises: whether backward passes end with a mean.
    """

    def __init__(self, comm: Communicator, module: torch.nn.Module, options: Options) -> None:
        """Give all ranks rank 0's parameters and buffers, and bind the all-reduces; collective.

        Raises:
            ValueError: on all ranks, if these cannot be replicas.
        """
        super().__init__(comm)
        self._module, self._options = module, options
        self.synchronises = True
        self._forwards = 0
        inventory = Inventory(module)
        fault = "" if inventory.trained else "no parameter needs a gradient"
        try:
            self._bind(inventory, fault)
        except ValueError:
            self._release()
            raise
        inventory.share(self._words)
        self._inventory = self._look()

    def begin_forward(self) -> None:
        """Meet before a forward pass in training."""
        self._settle()
        if not self.synchronises:
            return
        changed, changes = self._inventory.change(), self._inventory.changes()
        self._go_forward(self._meet(FORWARD, changed, changes, -changes))
        self.state.verified = True

    def reduce(self) -> None:
        """Average gradients that are no means yet; collective."""
        self._settle()
        if self.state.pending:
            self._average()

    def weigh(self, samples: float) -> None:
        """Weigh this rank's gradients in the next mean by its number of samples; collective.

        Raises:
            RuntimeError: on all ranks: one gives no number, or no rank has a sample.
        """
        self._settle()
        known = isinstance(samples, Real) and 0 <= samples < float("inf")
        self._meet(WEIGH, fault="" if known else f"{samples!r} is no number of samples")
        total = self._meetings.total(samples)
        if not total:
            raise Refused("DataParallel: no rank has a sample in this batch")
        self.state.weight = samples / total

    def register(self, state: Any, function: Function) -> None:
        """Let a communication hook sum the buckets; collective.

        Raises:
            RuntimeError: on all ranks: it is no function, or there is a hook already.
            ValueError: on all ranks: they have different hooks.
        """
        self._settle()
        fault = "" if callable(function) else f"a communication hook is a function, not {function}"
        if self.buckets.hook:
            fault = "it has a communication hook already, and there can be one"
        self._meet(HOOK, fault=fault)
        name = getattr(function, "__qualname__", type(function).__qualname__)
        if len(names := dict.fromkeys(self._words.allgather(name))) > 1:
            raise ValueError(
                f"DataParallel: the ranks have different communication hooks: {', '.join(names)}"
            )
        self.buckets.hook = Hook(function, state)

    def close(self) -> None:
        """Free what is bound; collective.

        Raises:
            ReplicaMismatch: on all ranks, which have changed their parameters equally often, and
                end with different ones.
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
        """Make buckets for the present parameters; collective."""
        inventory.check(self._words, self._options, fault)
        self._inventory = inventory
        self._forwards = 0
        options, trained = self._options, inventory.trained
        self.buckets.bind(trained, options.bucket_bytes, options.algorithm, self._arrived)

    def _arrived(self, bucket: int, index: int, parameter: torch.Tensor) -> None:
        """Autograd has accumulated the gradient of a parameter."""
        self.state.pending = True
        if self.join and parameter.grad is not None:
            before = parameter.grad._version - 1
            self.state.onto_mean |= getattr(parameter.grad, _MEAN_AT, None) == before
        if not self.synchronises:
            self.state.unsummed = True
            return
        if not is_alive(self._pass):
            self._settle()
            self._pass = BackwardPass.join(self._meetings.number, self._finish)
        self.buckets.note(bucket, index)
        if self._options.overlap:
            self.buckets.start(self._weight, complete=True)
        self.buckets.test()

    def _go_forward(self, agreed: Meeting) -> None:
        changed, most, least = agreed.numbers
        self._forwards += 1
        if changed:
            self._take_over(agreed)
        if changed == OTHER_PARAMETERS:
            self._inventory.share(self._words)
        elif agreed.joined:
            pass  # ranks without a batch have older parameters, and take over others' at the end
        elif most != -least or is_due(self._forwards):
            self._inventory.compare(self._words, f"at forward pass {self._forwards}")
        self._inventory.share_buffers(self._words, agreed.first)

    def _take_over(self, agreed: Meeting) -> None:
        """Accept the module's new parts, if they are the same on all ranks; collective."""
        self._check_unchanged(agreed)
        inventory = self._look()
        if agreed.numbers[0] == OTHER_PARAMETERS:
            self._bind(inventory)
        else:
            inventory.check(self._words, self._options)
            self._inventory = inventory

    def _check_unchanged(self, agreed: Meeting) -> None:
        if agreed.joined:
            raise Refused(
                "DataParallel: the module was changed while some ranks have no batch left; change "
                "it outside of join()"
            )

    def _finish(self) -> None:
        """End a backward pass."""
        self._pass = None
        self._average()

    def _average(self) -> None:
        self.buckets.start(self._weight, complete=False)
        late, known = self.buckets.late(), self.buckets.known()
        # Ranks that met before the forward pass know the parameters already.
        changed = self._inventory.change(buffers_alone=self.state.verified)
        incomplete = any(late) or not all(known)
        agreed = self._meet(AVERAGE, changed, incomplete, self.state.onto_mean, fault=self._fault())
        self._check_average(agreed)
        if agreed.numbers[0] != SAME:
            self._take_over(agreed)
        if agreed.numbers[0] == OTHER_PARAMETERS:  # the buckets belong to other parameters
            self._inventory.compare(self._words, "at the end of backward()")
            return self._average()
        self.buckets.give_back(*self._complete_means(agreed, late, known))
        self.state = GradientState()
        if self.join:
            for gradient in (p.grad for p in self._inventory.trained):
                if gradient is not None:
                    setattr(gradient, _MEAN_AT, gradient._version)

    def _check_average(self, agreed: Meeting) -> None:
        """Raise on all ranks, also on those that have joined, if there is no such mean."""
        changed, _, onto_mean = agreed.numbers
        if changed:
            self._check_unchanged(agreed)
        if onto_mean and self._is_by_ranks(agreed) and self._divides_by_all:
            raise Refused(
                "DataParallel: some ranks have no batch left, and divide_by_initial_world_size "
                "would make gradients smaller that an earlier pass has averaged; accumulate in "
                "no_sync(), weigh() the batches, or join(divide_by_initial_world_size=False)"
            )

    def _is_by_ranks(self, agreed: Meeting) -> bool:
        """Whether some ranks have joined, and the others count alike."""
        return agreed.joined and self.state.weight is None

    @property
    def _divides_by_all(self) -> bool:
        return self.join is None or self.join.divide_by_initial_world_size

    def _complete_means(
        self, agreed: Meeting, late: list[bool], known: list[bool]
    ) -> tuple[list[bool], float]:
        """Reduce again the buckets whose gradients changed after their sum began.

        Then all ranks take over the buffers of one.

        Returns:
            Whether any rank has a gradient, for each parameter, and the factor on the sums.
        """
        if agreed.numbers[1]:
            all_of = self._meetings.largest([*late, *known]).tolist()
            late, known = all_of[: len(late)], all_of[len(late) :]
        if self.buckets.sum_again(late, self._weight):
            self._give_up()
        self._inventory.share_buffers(self._words, agreed.first)  # for tests between steps
        by_ranks = self._is_by_ranks(agreed)
        self.state.weight, self.state.onto_mean = None, False
        if not by_ranks or self._divides_by_all:
            return known, 1.0
        present = not (self.join and self.join.absent)
        return known, self._words.size / self._meetings.total(present)

    def _fault(self) -> str:
        for name, parameter in self._inventory.parameters.items():
            gradient = parameter.grad if parameter.requires_grad else None
            if gradient is not None and (why := refusal(parameter, gradient)):
                return f"{name}: {why}"
        return self.buckets.fault()
