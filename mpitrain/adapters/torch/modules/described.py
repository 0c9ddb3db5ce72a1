"""Description of a torch module as a layer: its tensors, its shapes, and what is known about it."""

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike

from mpitrain.adapters.torch.arrays import (
    Moved,
    as_array,
    as_bytes,
    moved,
    named_tensors,
    same,
    tensors_of,
)
from mpitrain.adapters.torch.checks.module import note_inputs
from mpitrain.adapters.torch.checks.module_class import ImpureModule, moves, refuse, untouched
from mpitrain.adapters.torch.checks.probe import (
    MISFITS,
    Form,
    Tensors,
    expect_outputs,
    is_due,
    length,
    one_line,
)
from mpitrain.adapters.torch.functions.lent import Lent
from mpitrain.adapters.torch.modules.calls import Watched
from mpitrain.adapters.torch.modules.drawing import Drawing
from mpitrain.adapters.torch.modules.draws import DrawPlace, Where
from mpitrain.adapters.torch.modules.splits import NUMBER, Plan
from mpitrain.adapters.torch.modules.tensor_parallel import Region, Share, share_of
from mpitrain.arrays import Array, Shape
from mpitrain.fields import Fields, joined, zeros
from mpitrain.group import TensorGroup
from mpitrain.nn import Layer
from mpitrain.nn.context import RESTING
from mpitrain.nn.layer import Verdict


class TorchModule(Layer):
    """A module as a layer, but for its passes.

    Attributes:
        module: the module, or this rank's share of it.
        prefix: prefix of the parameters' names in the whole module.
        plan: how tensor ranks share the module.
        whole: module whose constants this layer reports: its own, or the one that it and the layers
            after it are parts of; None for these other layers.
        trained_names: names of the whole module's trained parameters, by identity.
        lent: parameters that it holds for the loss.
        moving: identities of constants of the whole module that change in training.
    """

    holds = True  # autograd's saved tensors are the parameters' memory
    sees = True
    choices = -1  # what integers mean is the module's affair

    def __init__(
        self, module: torch.nn.Module, name: str = "the module", prefix: str = "", *,
        takes: Form | None = None, training: bool | None = None,
    ) -> None:  # fmt: skip
        """Make it a layer.

        Args:
            module: the module.
            name: name of the module in errors.
            takes: makes one argument of several inputs, as in a ``torch.nn.Sequential``; None: they
                are arguments.
            training: mode of the whole module, within which parts may be held in another one.

        Raises:
            ImpureModule: the module cannot be a layer.
        """
        self._given = module
        self.whole: torch.nn.Module | None = module
        training = module.training if training is None else training
        refuse(name, module)
        self.module, self.prefix, self.plan = module, prefix, Plan()
        self._alone: TorchModule | None = None
        self.lent, self.moving = Lent({}), set[int]()
        self._share = Share(module, Region(TensorGroup()))
        self._types: dict[str, torch.dtype] = {}
        self._watched = Watched(name, module, training, self._share.region, takes)
        self.mixes = self._watched.norms.mixes
        self.trained_names = {id(p): n for n, p in self._given.named_parameters()}
        self._known = dict[Any, Shape]()
        self._forwards = self._filler = self._changes = 0
        self._moved: Moved = {}

    def follow(self, changed: Mapping[str, Mapping[str, Any]]) -> None:
        """Take attributes that the program has set, by the names of the whole module's parts.

        The module of a layer with cuts or splits is a copy of the program's.  Tensor ranks divide
        the numbers that splits name, and compare their shares anew, if not each time.

        Raises:
            ImpureModule: the ranks cannot share a number equally.
        """
        for name, part in self.module.named_modules(remove_duplicate=False):
            for key, value in changed.get(f"{self.prefix}{name}".rstrip("."), {}).items():
                vars(part)[key] = self._own_number(f"{name}.{key}".lstrip("."), value)
        self._watched.own_loss.forget()
        if self._alone:
            self._alone.follow(changed)
            self._changes += 1
            self._watched.verdict.compares |= is_due(self._changes)

    def _own_number(self, name: str, value: Any) -> Any:
        """The part of a number that tensor ranks share, or another value as it is."""
        split = self._alone and self._alone.plan.splits.get(name)
        if not split or split.kind != NUMBER:
            return value
        try:
            return share_of(value, 1, self._share.region.group.size, name)
        except (TypeError, ValueError) as error:
            fault = f"{name} cannot be {value!r} in {self._watched.name}: {error}"
            raise ImpureModule(f"parallel.tensor: {fault}") from error

    def parameters(
        self, rng: np.random.Generator, xp: ModuleType, dtype: DTypeLike
    ) -> dict[str, Array]:
        """The values in the module; ``rng`` is not used."""
        values = {name: as_array(p.double()).astype(dtype) for name, p in self._trained()}
        return {name: xp.asarray(array) for name, array in values.items()}

    def shapes(self) -> dict[str, Shape]:
        return {name: tuple(p.shape) for name, p in self._trained()} | self.lent.shapes

    def _trained(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        return ((name, p) for name, p in self.module.named_parameters() if p.requires_grad)

    def _constants(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Buffers and frozen parameters, but for running values of batch norm."""
        for name, one in named_tensors(self.module).items():
            is_trained = isinstance(one, torch.nn.Parameter) and one.requires_grad
            if not is_trained and name not in self._watched.norms.running:
                yield name, one.detach()

    def brought(self) -> dict[str, Array]:
        """The bytes of parameters and buffers."""
        return {name: as_bytes(tensor) for name, tensor in named_tensors(self.module).items()}

    def constants(self) -> dict[str, torch.Tensor]:
        """Frozen parameters and constant buffers of :attr:`whole`, under all of their names."""
        if self.whole is None:
            return {}
        kept = {
            id(buffer)
            for part in self.whole.modules()
            if moves(part, self.whole.training)
            for buffer in part.buffers()
        } | self.moving
        every = {**self.whole.state_dict(keep_vars=True), **dict(self.whole.named_buffers())}
        return {
            name: tensor.detach()
            for name, tensor in every.items()
            if isinstance(tensor, torch.Tensor)
            and id(tensor) not in kept
            and not tensor.requires_grad
        }

    def output_shape(self, shape: Shape) -> Shape:
        """Shape of the output for a sample of zeros, or of ones, which may be lengths of sequences.

        Numbers are tried in the parameters' type first, then integers.
        """
        if self._alone is not None:
            return self._alone.output_shape(shape)
        key = shape, getattr(shape, "dtype", None)
        if key in self._known:
            return self._known[key]
        kind = next((p.dtype for p in self.module.parameters()), torch.get_default_dtype())
        refused: Exception | None = None
        for value, dtype in ((0, kind), (0, torch.int64), (1, kind), (1, torch.int64)):
            wide = as_array(torch.ones(0, dtype=dtype)).dtype
            sample = tensors_of(zeros(2, shape, wide), kind)  # one would mix with nothing
            try:
                found = self._tried({name: part.fill_(value) for name, part in sample.items()})
                self._filler, self._known[key] = value, found
                return found
            except MISFITS as error:
                refused = refused or error
        # As of a derivative in forward(), which plain tests have no graph for, either.
        cure = "; take it under torch.enable_grad()" * ("not require grad" in str(refused))
        text = f"it cannot take a sample of shape {shape!r}: {one_line(refused)}{cure}"
        raise ValueError(text) from refused

    def _tried(self, x: Tensors) -> Shape:
        """Shape of the output for a sample, of several.

        Constants that the module changes are state, if it changes them alike for another sample.
        """
        found, moved = self._moved_by(x)
        if moved:
            _, others = self._moved_by({n: (part == 0).to(part) for n, part in x.items()})
            own = named_tensors(self._given)
            alike = {n for n in moved.keys() & others.keys() if same(moved[n], others[n])}
            self._watched.state = frozenset(alike & own.keys())
            self.moving |= {id(own[name]) for name in self._watched.state}
        expect_outputs(found, length(x))
        if "" in found:
            return tuple(found[""].shape[1:])
        return Fields(joined({name: as_array(part) for name, part in found.items()}).dtype)

    @torch.no_grad()
    def _moved_by(self, x: Tensors) -> tuple[Tensors, Tensors]:
        """Outputs for a sample in training mode, and what changes of copies of the constants."""
        watched, before = self._watched, dict(self._constants())
        watched.norms.begin(RESTING, np, counts=True)
        watched.state, watched.source = frozenset(before), nullcontext()  # any of them may be
        source = Drawing(watched.draws, RESTING, np, ())
        try:
            with untouched(self.module), watched.in_mode(training=True), source:
                fresh = {name: one.clone() for name, one in x.items()}
                found = watched({name: one.clone() for name, one in before.items()}, fresh)
        finally:
            watched.state = frozenset()
        note_inputs(watched, fresh)
        if not source.drew:  # no further trial is needed
            watched.modes.discard(True)
            watched.seen.add(True)
        self.mixes = watched.norms.mixes
        after, watched.constants = watched.constants, {}
        kept = {n for n in after.keys() - watched.changed if same(after[n], before[n])}
        return found, {name: after[name] for name in after.keys() - kept}

    def formed(self, outputs: Mapping[str, Any]) -> Any:
        """Outputs by name in the form in which the module gave its latest ones."""
        return self._watched.own_loss.form(outputs)

    def give_only_loss(self) -> None:
        """Leave all outputs but the module's own loss out, if it has one."""
        self._watched.only_loss = True

    def keep_types(self) -> None:
        """Compute with each parameter and buffer in the type that it has in the module."""
        self._types = {name: one.dtype for name, one in named_tensors(self.module).items()}
        kinds = [kind for kind in self._types.values() if kind.is_floating_point]
        self._watched.narrow = max(kinds, key=lambda kind: torch.finfo(kind).eps)
        self._watched.wide = torch.float64 if torch.float64 in kinds else torch.float32

    @property
    def draws(self) -> bool:
        """Whether the module draws random numbers in training."""
        return True in self._watched.modes

    def drawn(self) -> Iterator[tuple[DrawPlace, Where]]:
        """Where the latest pass has drawn random numbers, and whose they are."""
        source, where = self._watched.source, self._watched.draws.where
        shapes = source.shapes if isinstance(source, Drawing) else {}
        yield from ((place, where[place]) for place in shapes if place in where)

    @property
    def keeps_types(self) -> bool:
        """Whether it computes with each parameter in a type of its own."""
        return bool(self._types)

    def verdicts(self) -> list[Verdict]:
        return [self._watched.verdict]

    def state(self, dtype: DTypeLike) -> dict[str, Array]:
        """Running values of batch norm, and constants that follow from parameters, by name."""
        names = self._watched.state | self._watched.norms.running
        return {
            name: as_array(one.double()).astype(dtype)
            for name, one in named_tensors(self.module).items()
            if name in names
        }

    def _buffers(self, like: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Constants, or this rank's parts, in this tensor's type if all have one."""
        for name, constant in self._constants():
            here = moved(self._moved, name, constant, like.device)
            part = self._share.part(name, here)
            both = part.is_floating_point() and like.is_floating_point() and not self._types
            yield name, part.to(like.dtype if both else part.dtype)
