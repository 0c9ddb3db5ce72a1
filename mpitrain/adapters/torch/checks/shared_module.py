"""Check that what ranks compute together is what one process computes."""

from dataclasses import replace

import numpy as np
import torch

from mpitrain.adapters.torch.arrays import named_tensors
from mpitrain.adapters.torch.checks.module import learn, outcome
from mpitrain.adapters.torch.checks.module_class import ImpureModule
from mpitrain.adapters.torch.checks.probe import MISFITS, alike, close, one_line
from mpitrain.adapters.torch.modules.calls import Call, Watched
from mpitrain.adapters.torch.modules.regions import AgreedFault, Share


class Comparison:
    """Comparison of a rank's share with the whole module, on a batch of at least one sample.

    Both have the values that the module was given with.
    """

    def __init__(self, own: Share, call: Call, whole: Watched) -> None:
        """``call`` of the share has values of the type and on the device of training."""
        self._own = own
        like = next((one for one in call.values.values() if one.requires_grad), None)
        like = next(iter(call.x.values())) if like is None else like

        def like_given(value: torch.Tensor) -> torch.Tensor:
            both = value.is_floating_point() and like.is_floating_point()
            return value.detach().to(like.device, like.dtype if both else value.dtype)

        every = named_tensors(whole.module)
        values = {name: like_given(value) for name, value in every.items()}
        parts = {name: own.part(name, value).clone() for name, value in values.items()}
        self._trained = [n for n, p in whole.module.named_parameters() if p.requires_grad]
        self._calls = replace(call, values=parts), replace(call, watched=whole, values=values)

    def expect_same(self, *, training: bool) -> None:
        """Check results and gradients in a mode, on the same samples with the same random numbers.

        Raises:
            ImpureModule: they differ.
        """
        shared, whole = (
            one.of(training=training, samples=np.arange(len(one))) for one in self._calls
        )
        own = shared.watched
        if training:
            whole.watched.modes = set(own.modes)
            if own.modes and not shared.context.keyed:
                return
            for mode in own.modes:
                learn(whole.of(training=mode))
            ranks = self._own.region.group.size
            if self._own.axes and (fault := own.draws.cut_as(whole.watched.draws, ranks)):
                self._refuse(fault)
        region, fault = self._own.region, ""
        try:
            with region.being(is_trial=True):
                is_same = all(
                    self._is_same(shared.of(), whole.of(), loud=loud)
                    for loud in ((True, False) if training and own.modes else (False,))
                )
            if not is_same and not own.drew:
                fault = "results or gradients are others than those of one process"
        except AgreedFault as error:
            self._refuse(str(error))
        except MISFITS as error:
            fault = f"{type(error).__name__}: {one_line(error)}"
        # A rank may see a fault in its own part of the gradients alone.
        if region.agree(fault):
            self._refuse(fault or "gradients on another rank are others than those of one process")

    def _is_same(self, shared: Call, whole: Call, *, loud: bool) -> bool:
        (own, ours), (wanted, theirs) = (
            outcome(one, [one.values[name].requires_grad_() for name in self._trained], loud=loud)
            for one in (shared, whole)
        )
        most = max((float(one.abs().max()) for one in theirs if one.numel()), default=0.0)
        # All ranks have the same samples here, and such a gradient has a term for each of them.
        terms = dict.fromkeys(self._own.served, self._own.region.group.size)
        return alike(wanted, own) and all(
            close(one / terms.get(name, 1), self._own.part(name, other), most)
            for name, one, other in zip(self._trained, ours, theirs, strict=True)
        )

    def _refuse(self, fault: str) -> None:
        name = self._calls[0].watched.name
        raise ImpureModule(self._own.refusal.format(name=name, fault=fault))
