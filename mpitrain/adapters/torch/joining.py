"""Ranks that have no batch left, while others have."""

from typing import Any, NamedTuple

import torch

from mpitrain.adapters.torch.inventory import share
from mpitrain.adapters.torch.reducer import Reducer
from mpitrain.adapters.torch.rendezvous import AVERAGE, FORWARD, JOIN, JOINED, WEIGH, largest, total


class Join(NamedTuple):
    """What ranks do that have no batch left, while others have.

    Attributes:
        divide_by_initial_world_size: they count in the means, with gradients of 0.
        throw_on_early_termination: they end all ranks with an error.
        following: how many objects take over the state of the rank that ended last.
    """

    divide_by_initial_world_size: bool
    throw_on_early_termination: bool
    following: int


class JoiningReducer(Reducer):
    """A reducer whose ranks may have unequally many batches between :meth:`begin_join` and
    :meth:`attend`."""

    _join: Join

    def begin_join(self, join: Join) -> None:
        """From now on, ranks may run out of batches; collective.

        Raises:
            ValueError: on all ranks, if they have different arguments.
        """
        self._settle()
        code = sum(int(value) << place for place, value in enumerate(join))
        most, least, _ = self._meet(JOIN, code, -code).numbers
        if most != -least:
            raise ValueError("DataParallel.join: give all ranks the same arguments")
        self._join, self._joining = join, True
        self._divides_by_all = join.divide_by_initial_world_size

    def leave_join(self) -> None:
        """All ranks are in one place again."""
        self._joining = self._absent = False
        self._part_of_mean = None

    def attend(self) -> int:
        """Take part with nothing until no rank has a batch left; then the values of the rank that
        ended last are everybody's.

        Returns:
            That rank, or -1 if all ended together.

        Raises:
            RuntimeError: on all ranks: this one holds gradients that no mean has, the module was
                changed, or ``throw_on_early_termination``.
        """
        self._settle()
        fault, self._absent = self._why_not_absent(), True
        self._part_of_mean = None
        missed = 0
        while (agreed := self._meet(JOINED, fault=fault)).doing != JOINED:
            missed = 1
            if agreed.doing == FORWARD:
                self._go_forward(agreed)
            elif agreed.doing == WEIGH:
                total(self._words, 0, self._buckets.test)
                self._part_of_mean = 0.0
            elif agreed.doing == AVERAGE:
                self._check_average(agreed)
                nothing = [False] * len(self._buckets.known())
                self._complete_means(agreed, self._buckets.late(), nothing)
        self.leave_join()
        told = largest(
            self._words, [missed, -1 if missed else self._words.rank], self._buckets.test
        )
        if not told[0]:
            return -1
        self._share_all(int(told[1]))
        self._share_gradients(int(told[1]))
        self.pending = self._verified = False
        self._forwards = 0  # an optimiser that has fallen behind is found after its next step
        return int(told[1])

    def follow(self, thing: Any, root: int) -> None:
        """An optimiser, a scheduler takes over its state on rank ``root``; collective."""
        state = self._words.bcast(thing.state_dict() if self._words.rank == root else None, root)
        if self._words.rank != root:
            thing.load_state_dict(state)

    def _why_not_absent(self) -> str:
        if self._join.throw_on_early_termination:
            return "it has no batch left, and join() was given throw_on_early_termination"
        if self._part_of_mean is not None:
            return "its last batch was weighed and did not go backward"
        gradients = [p.grad for p in self._inventory.trained if p.grad is not None]
        if self._unsummed and any(bool(gradient.any()) for gradient in gradients):
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
