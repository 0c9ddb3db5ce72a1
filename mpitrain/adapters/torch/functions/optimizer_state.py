"""The state of training in an optimiser of torch."""

import torch

from mpitrain.adapters.torch.functions.optimizer import TorchOptimizer
from mpitrain.adapters.torch.modules.whole import trained
from mpitrain.config import ConfigError
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
    whole = {
        slot: parts.whole([own[slot] for own in parts.updater.state].__getitem__, everywhere=True)
        for slot in optimizer.slots
    }
    updates, _ = parts.updater.counts()
    left_out: dict[str, int] = {}
    for _, own in parts.comm.allgather(parts.updater.counts()):
        left_out |= own
    made, step = optimizer.like, min(parts.steps_done, parts.total_steps - 1)
    made.state.clear()
    for name, parameter in parameters.items():
        taken = updates - left_out.get(name, 0)
        if taken > 0:
            arrays = {slot: own[name].reshape(-1) for slot, own in whole.items()}
            made.state[parameter].update(optimizer.state_of(arrays, parameter, taken))
        group = parts.updater.grouping(name)
        now = group.at(step)
        assert isinstance(now.optimizer, TorchOptimizer)
        rate = parts.rates.common(step) * now.rate
        made.param_groups[group.number].update(now.optimizer.options, lr=rate)
    return made
