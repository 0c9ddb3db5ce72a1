"""The state that an optimiser of torch begins with, if it has taken steps."""

from collections.abc import Collection, Mapping

import torch

from mpitrain.config import ConfigError
from mpitrain.optim.optimizers import Beginning


def begun(
    made: torch.optim.Optimizer,
    named: Mapping[str, torch.nn.Parameter],
    slots: Collection[str],
    *,
    whole: bool,
) -> dict[str, Beginning]:
    """The state of each parameter that has had a step, by the parameters' names.

    Args:
        made: the program's optimiser.
        named: its parameters.
        slots: names of the arrays that an optimiser of its kind keeps.
        whole: whether their shapes may be others than the parameters'.

    Raises:
        ConfigError: it keeps something else.
    """
    found = {}
    for name, parameter in named.items():
        state = {k: v for k, v in made.state.get(parameter, {}).items() if v is not None}
        taken = int(state.pop("step", 1 if state else 0))
        if not taken:
            continue  # some have initial state before their first step
        if state.keys() - set(slots) or not (whole or state.keys() == set(slots)):
            raise ConfigError(
                f"optimizer: it has taken steps and keeps {', '.join(state) or 'nothing'} of "
                f"{name}, and a new one keeps {', '.join(slots) or 'nothing'}; load the state of "
                "its own kind, or make a new one"
            )
        arrays = {}
        for slot, value in state.items():
            flat = torch.zeros(parameter.numel(), dtype=torch.float64)
            kept = torch.as_tensor(value).detach().to(flat)
            if kept.dim():
                flat[: kept.numel()] = kept.flatten()
            else:
                flat.fill_(kept)
            arrays[slot] = flat.numpy()
        found[name] = Beginning(taken, arrays)
    return found
