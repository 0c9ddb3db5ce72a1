"""Ranks that have no batch left, while others have."""

from typing import Any

import torch

from mpitrain.adapters.torch.inventory import share
from mpitrain.adapters.torch.reducer import Reducer
from mpitrain.adapters.torch.rendezvous import AVERAGE, FORWARD, JOIN, JOINED, WEIGH
from mpitrain.adapters.torch.session import GradientState, Join


class JoiningReducer(Reducer):
    """A reducer whose ranks may have different numbers of batches within a block."""

    def begin_join(self, join: Join) -> None:
        """Begin a block in which ranks may run out of batches; collective.

        Raises:
            ValueError: on all ranks, if they have different arguments.
        """
        self._settle()
        self._meet(JOIN)
        if any(given != join for given in self._words.allgather(join)):
            raise ValueError("DataParallel.join: give all ranks the same arguments")
        self.join = join

    def leave_join(self) -> None:
        """End the block."""
        self.join = None
        self.state.weight = None

    def attend(self, join: Join) -> int:
        """Take part with nothing until no rank has a batch left.

        Then all ranks take over the values of the rank that ended last.

        Returns:
            The rank that ended last, or -1 if all ended together.

        Raises:
            RuntimeError: on all ranks: this one holds gradients that no mean has, the module was
                changed, or ``throw_on_early_termination``.
        """
        self._settle()
        fault, join.absent = self._why_not_absent(join), True
        self.state.weight = None
        missed = 0
        while (agreed := self._meet(JOINED, fault=fault)).doing != JOINED:
            missed = 1
            if agreed.doing == FORWARD:
                self._go_forward(agreed)
            elif agreed.doing == WEIGH:
                self._meetings.total(0)
                self.state.weight = 0.0
            elif agreed.doing == AVERAGE:
                self._check_average(agreed)
                nothing = [False] * len(self.buckets.known())
                self._complete_means(agreed, self.buckets.late(), nothing)
        self.leave_join()
        any_missed, root = self._meetings.largest([missed, -1 if missed else self._words.rank])
        if not any_missed:
            return -1
        self._inventory.share(self._words, int(root))
        self._share_gradients(int(root))
        self.state = GradientState()
        self._forwards = 0  # an optimiser that has fallen behind is found after its next step
        return int(root)

    def follow(self, thing: Any, root: int) -> None:
        """Give an optimiser or a scheduler its state on rank ``root``; collective."""
        state = self._words.bcast(thing.state_dict() if self._words.rank == root else None, root)
        if self._words.rank != root:
            thing.load_state_dict(state)

    def _why_not_absent(self, join: Join) -> str:
        if join.throw_on_early_termination:
            return "it has no batch left, and join() was given throw_on_early_termination"
        if self.state.weight is not None:
            return "its last batch was weighed and did not go backward"
        gradients = [p.grad for p in self._inventory.trained if p.grad is not None]
        if self.state.unsummed and any(bool(gradient.any()) for gradient in gradients):
            return (
                "it has no batch left, and gradients from no_sync() that no mean has: average each "
                "rank's last pass, or call zero_grad() where they are not wanted"
            )
        return ""

    def _share_gradients(self, root: int) -> None:
        own = [p.grad is not None for p in self._inventory.trained]
        for parameter, known in zip(self._inventory.trained, self._words.bcast(own, root)):
            if not known:
                parameter.grad = None
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, requires_grad=False)
            share(self._words, [parameter.grad], root)
