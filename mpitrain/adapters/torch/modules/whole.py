"""Torch modules as layers of the trainer, and trained values for the modules."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TypeGuard

import numpy as np
import torch

from mpitrain.adapters.torch.arrays import as_tensor, named_tensors
from mpitrain.adapters.torch.checks.module_class import ImpureModule, moves, settle_modes
from mpitrain.adapters.torch.checks.probe import Form
from mpitrain.adapters.torch.checks.shared_memory import expect_apart
from mpitrain.adapters.torch.modules.cutting import cut, has_hooks
from mpitrain.adapters.torch.modules.layer import TorchLayer
from mpitrain.adapters.torch.modules.splits import plan
from mpitrain.arrays import Array
from mpitrain.fields import as_given
from mpitrain.nn import Chain, Layer
from mpitrain.nn.chain import full_name
from mpitrain.ranks.together import together
from mpitrain.training.evaluation import averaged
from mpitrain.training.parts import Parts

_IN_TURN = torch.nn.Sequential.forward, torch.nn.Sequential.train


def layers(
    module: torch.nn.Module,
    cuts: str | Sequence[str] = (),
    inputs: Array | None = None,
    splits: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Layer]:
    """A module as layers, to be put into pipeline stages.

    Each part of a ``torch.nn.Sequential`` with parameters of one type is one, unless ``splits``
    name columns and rows in several parts, or each part between the ``cuts``; otherwise the module
    is one layer.  Training leaves the module as it is: :func:`load_into` gives it the trained
    values.

    Args:
        module: the module.
        cuts: names of modules within it, in the order in which they are called, behind which it is
            cut, or the name of a list of them (:func:`cut`).
        inputs: inputs for some samples, on which a module that is cut is tried.
        splits: how tensor ranks share its matrices, by names (:func:`plan`).

    Raises:
        TypeError: ``module`` is no module.
        ImpureModule: a part cannot be a layer, or the module has hooks that belong to none.
        ValueError: the module cannot be cut there, there are no inputs, or ``splits`` name what it
            does not have.
    """
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"layers() takes a torch.nn.Module, not a {type(module).__name__}")
    settle_modes(module)
    expect_apart(module)
    every = plan(module, splits)
    pieces: dict[str, tuple[str, torch.nn.Module]]
    if cuts:
        if inputs is None:
            raise ValueError(
                "cuts: a module is tried before it is cut; give inputs of some samples"
            )
        pieces = {f"part{n}": ("", part) for n, part in enumerate(cut(module, cuts, inputs))}
    elif _in_turn(module) and every.is_of_parts:
        if has_hooks(module):
            raise ImpureModule(
                f"a {type(module).__name__} cannot be taken apart, as its own hooks belong to no "
                "part of it; register them on the parts, or put it into another Sequential"
            )
        names = zip(module._modules, module, strict=True)
        pieces = {f"part{n}": (f"{name}.", part) for n, (name, part) in enumerate(names)}
    else:
        pieces = {"part0": ("", module)}
    own_names = {id(p): name for name, p in module.named_parameters()}
    moving = set[int]()
    found: dict[str, Layer] = {}
    owners: dict[int, str] = {}
    norms: dict[int, str] = {}
    takes: Form = as_given
    for name, (prefix, part) in pieces.items():
        for own, inner in part.named_modules():
            if moves(inner, module.training) and norms.setdefault(id(inner), name) != name:
                raise ImpureModule(
                    f"{name}.{own} ({type(inner).__name__}) is in {norms[id(inner)]}, too, and has "
                    "one running mean and variance; make two of it, or one part of both"
                )
        layer = TorchLayer(
            part, name, prefix, takes=takes if prefix else None, training=module.training
        )
        takes = layer.formed
        tied = {}
        for own, parameter in part.named_parameters():
            owner = owners.setdefault(id(parameter), f"{name}.{own}")
            if parameter.requires_grad and not owner.startswith(f"{name}."):
                tied[own] = owner
        layer.tied = tied
        layer.whole = None if found else module
        layer.trained_names, layer.moving = own_names, moving
        layer.plan = every.within(prefix)
        found[name] = layer
    return found


def _in_turn(module: torch.nn.Module) -> TypeGuard[torch.nn.Sequential]:
    """Whether its parts are layers in turn; one layer keeps several types, or its train()."""
    own = type(module)
    is_plain = isinstance(module, torch.nn.Sequential) and (own.forward, own.train) == _IN_TURN
    return is_plain and len({p.dtype for p in module.parameters()}) < 2


def torch_layers(layers: Iterable[Layer]) -> Iterator[TorchLayer]:
    """The torch modules among layers, also within chains of layers."""
    for layer in layers:
        if isinstance(layer, TorchLayer):
            yield layer
        elif isinstance(layer, Chain):
            yield from torch_layers(layer.layers.values())


def trained(module: torch.nn.Module, layers: Mapping[str, Layer]) -> dict[str, torch.nn.Parameter]:
    """The trained parameters of a module in its own order, by their names in these layers."""
    every = dict(module.named_parameters(remove_duplicate=False))
    found = {
        f"{name}.{own}": every[layer.prefix + own]
        for name, layer in layers.items()
        if isinstance(layer, TorchLayer)
        for own in layer.shapes()
        if own not in layer.tied
    }
    order = {id(parameter): number for number, parameter in enumerate(module.parameters())}
    return dict(sorted(found.items(), key=lambda one: order[id(one[1])]))


def names_in(module: torch.nn.Module, layers: Mapping[str, Layer]) -> dict[str, str]:
    """Names in the trainer of the entries of a module's ``state_dict``, by their names there.

    Constants have their own name in the module.
    """
    every = module.state_dict(keep_vars=True)
    whose = {
        id(every[full]): layer.tied.get(own, f"{name}.{own}")
        for name, layer in layers.items()
        for own, full in _in_module(layer).items()
        if full in every
    }
    first: dict[int, str] = {}
    return {
        name: whose.get(id(tensor)) or first.setdefault(id(tensor), name)
        for name, tensor in every.items()
        if isinstance(tensor, torch.Tensor)
    }


def load_into(module: torch.nn.Module, parts: Parts) -> None:
    """Give the module that :func:`layers` was called with the trained values, on all ranks.

    With ``optim.average``, these are the averages.  The module's layers may be in a ``Chain`` or
    another layer; values of other layers of the trainer are left out.  Collective.

    Raises:
        ValueError: on all ranks; the module lacks a parameter or buffer of a layer, or has two of
            them in one memory.
    """
    with averaged(parts):
        _load_into(module, parts)


def _load_into(module: torch.nn.Module, parts: Parts) -> None:
    every = named_tensors(module, every=True)
    names = {
        full: layer.tied.get(own, f"{name}.{own}")
        for name, layer in parts.model.layers.items()
        for own, full in _in_module(layer).items()
    }

    def expect_all() -> None:
        expect_apart(module)
        for full in sorted(names.keys() - every.keys()):
            raise ValueError(
                f"load_into: layer {names[full].partition('.')[0]} has trained {full!r}, and the "
                f"module ({type(module).__name__}) has none of that name; give the module whose "
                "layers the trainer has"
            )

    together(parts.comm, expect_all, ValueError)
    values = parts.whole(lambda number: parts.store.pieces[number].parameters, everywhere=True)
    state = {name: parts.device.get(array) for name, array in parts.state.items()}
    for own in parts.comm.allgather(state):
        values |= own
    with torch.no_grad():
        for full in names.keys() & every.keys():
            if (value := values.get(names[full])) is not None:
                every[full].copy_(as_tensor(np.asarray(value)))


def _in_module(layer: Layer) -> dict[str, str]:
    """Names in the whole module, by the names in the layer."""
    if isinstance(layer, TorchLayer):
        every = layer.shapes().keys() - layer.lent.shapes.keys() | layer.state(np.float32).keys()
        return {own: layer.prefix + own for own in every}
    inner = layer.layers if isinstance(layer, Chain) else {}
    return {
        full_name(name, own): full
        for name, part in inner.items()
        for own, full in _in_module(part).items()
    }
