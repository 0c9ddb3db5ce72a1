"""The state of training in an optimiser of torch."""

from collections.abc import Mapping
from math import prod

import numpy as np
import torch

from mpitrain.adapters.torch.functions.optimizer import TorchOptimizer
from mpitrain.adapters.torch.modules.whole import trained
from mpitrain.arrays import Array
from mpitrain.config import ConfigError
from mpitrain.parallel.store import overlaps
from mpitrain.training.parts import Parts


def handed_over(parts: Parts, module: torch.nn.Module) -> torch.optim.Optimizer:
    """The program's optimiser of a module, with the state and the rates of training.

    Rates and other scheduled options are those of the
    next step, or of the last one after the end.  Collective; costs the whole state on each rank.

    Raises:
        ConfigError: on all ranks: the optimiser is none of torch, or its state does not belong to
            the module's values, which are averages or a consensus of workers.
    """
    config, optimizer = parts.config, parts.objects.optimizer
    if not isinstance(optimizer, TorchOptimizer):
        raise ConfigError(
            "torch_optimizer(): the job has no optimiser of torch; give optimizer=, as lambda p: "
            "torch.optim.AdamW(p, lr=3e-3)"
        )
    if config.optim.average or config.sync.drifts:
        raise ConfigError(
            "torch_optimizer(): the module has averages (optim.average, or those of workers, "
            "[sync]), and the optimiser's state belongs to other values; train without them"
        )
    parameters = trained(module, parts.objects.layers or {})
    whole = _gathered(parts, optimizer.slots)
    updates, _ = parts.updater.counts()
    left_out: dict[str, int] = {}
    for _, own in parts.comm.allgather(parts.updater.counts()):
        left_out |= own
    made, step = optimizer.like, min(parts.steps_done, parts.total_steps - 1)
    made.state.clear()
    for name, parameter in parameters.items():
        taken = updates - left_out.get(name, 0)
        if taken > 0:
            arrays = {slot: whole[name, slot] for slot in optimizer.slots}
            made.state[parameter].update(optimizer.state_of(arrays, parameter, taken))
        group = parts.updater.grouping(name)
        now = group.at(step)
        assert isinstance(now.optimizer, TorchOptimizer)
        rate = parts.rates.common(step) * now.rate
        made.param_groups[group.number].update(now.optimizer.options, lr=rate)
    return made


def _gathered(parts: Parts, slots: tuple[str, ...]) -> Mapping[tuple[str, str], Array]:
    """Whole flat arrays of the optimiser's state by (tensor, slot), on all ranks; collective."""
    own = []
    for index, piece in enumerate(parts.store.pieces):
        if not parts.grid.counts(piece.group):
            continue
        counted = parts.store.counted(piece)
        for tensor, part in overlaps(parts.arena.tensors, piece, counted):
            size, start = prod(tensor.whole), piece.start + part.start - tensor.start
            every = tensor.part(np.arange(size).reshape(tensor.whole)).ravel()
            where = every[start : start + part.stop - part.start]
            for slot in slots:
                values = parts.device.get(parts.updater.state[index][slot][part])
                own.append((tensor.name, slot, size, where, values))
    found: dict[tuple[str, str], Array] = {}
    for others in parts.comm.allgather(own):
        for name, slot, size, where, values in others:
            found.setdefault((name, slot), np.zeros(size, values.dtype))[where] = values
    return found
