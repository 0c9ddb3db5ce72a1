"""A torch module as a layer of the trainer."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike

from mpitrain.adapters.torch.arrays import (
    Moved,
    as_array,
    as_bytes,
    as_tensor,
    moved,
    named_tensors,
    on_stream_of,
    same,
    tensors_of,
)
from mpitrain.adapters.torch.checks.module import (
    Comparison,
    expect_the_same_trained,
    expect_unchanged,
    learn,
    note_inputs,
    without_autocast,
)
from mpitrain.adapters.torch.checks.module_class import moves, refuse, untouched
from mpitrain.adapters.torch.checks.probe import (
    MISFITS,
    Form,
    Tensors,
    expect_outputs,
    is_due,
    one_line,
)
from mpitrain.adapters.torch.functions.lent import Lent, stray
from mpitrain.adapters.torch.modules.calls import Call, Watched, changes
from mpitrain.adapters.torch.modules.drawing import Drawing
from mpitrain.adapters.torch.modules.draws import DrawPlace, Where
from mpitrain.adapters.torch.modules.expert_parallel import expert_share
from mpitrain.adapters.torch.modules.passes import Pass
from mpitrain.adapters.torch.modules.regions import Region, Share
from mpitrain.adapters.torch.modules.splits import Plan
from mpitrain.adapters.torch.modules.stand_ins import set_context, stand_ins, with_stand_ins
from mpitrain.adapters.torch.modules.tensor_parallel import share
from mpitrain.arrays import Array, Gradients, Parameters, Shape, array_namespace
from mpitrain.fields import Fields, fields, filled, joined, zeros
from mpitrain.group import TensorGroup
from mpitrain.nn import Layer
from mpitrain.nn.context import RESTING, Context
from mpitrain.nn.layer import Verdict


class TorchLayer(Layer):
    """A module as a layer, for pipelines, ZeRO, checkpoints and all else.

    The parameters of a call become the module's for the call, on the CPU or a GPU; nothing is
    copied.  Stand-ins replace torch's batch norm: moments are over the batch of all replicas.
    Random numbers depend on seed, step, place, sample and position in the sample.  Training is in
    training mode but for parts that are held in evaluation mode, and tests are in evaluation mode.
    Otherwise, a module must be a function of its parameters and its input.  One that changes
    buffers is refused: by its class when the layer is made, and by a watch on torch's generator and
    the buffers at each batch.  The shadow tells of one that mixes the samples of a batch.  Constant
    buffers and frozen parameters are cast as the parameters are, and keep their values;
    :meth:`keep_types` keeps all types.

    A module need not take an empty batch: on a rank without samples, it is called with a sample of
    zeros that counts nowhere, so that it still meets the other ranks in batch norm.

    Attributes:
        module: the module, with stand-ins.
        prefix: prefix of the parameters' names in the whole module.
        plan: how tensor ranks share the module.
        experts: names of its modules that hold experts.
        whole: module whose constants this layer reports: its own, or the one that it and the layers
            after it are parts of; None for these other layers.
        trained_names: names of the whole module's trained parameters, by identity.
        lent: parameters that it holds for the loss.
        moving: identities of constants of the whole module that change in training.
    """

    holds = True  # autograd's saved tensors are the parameters' memory
    sees = True

    def __init__(
        self,
        module: torch.nn.Module,
        name: str = "the module",
        prefix: str = "",
        *,
        takes: Form | None = None,
        training: bool | None = None,
    ) -> None:
        """Make it a layer.

        Args:
            module: the module.
            name: name of the module in errors.
            prefix: prefix of the parameters' names in the whole module.
            takes: makes one argument of several inputs, as in a ``torch.nn.Sequential``; None: they
                are arguments.
            training: mode of the whole module, within which parts may be held in another one.

        Raises:
            ImpureModule: the module cannot be a layer.
        """
        self._given = module
        self.whole: torch.nn.Module | None = module
        training = module.training if training is None else training
        module = with_stand_ins(module, training)
        refuse(name, module)
        self.module, self.prefix, self.plan = module, prefix, Plan()
        self.experts: Sequence[str] = ()
        self._alone: TorchLayer | None = None
        self.lent, self.moving = Lent({}), set[int]()
        self._share = Share(module, Region(TensorGroup()))
        self._types: dict[str, torch.dtype] = {}
        self._watched = Watched(name, module, training, self._share.region, takes)
        self.mixes = any(True for _ in stand_ins(module))
        self.trained_names = {id(p): n for n, p in self._given.named_parameters()}
        self._known = dict[Any, Shape]()
        self._forwards = self._filler = 0
        self._moved: Moved = {}

    def shared(self, group: TensorGroup) -> "TorchLayer":
        """The layer as this rank of a tensor group has it; itself, if the group shares nothing.

        Raises:
            ValueError: the ranks cannot share it equally.
        """
        own = share(self.module, self.plan, group)
        return self._as(own) if own.axes else self

    def among(self, group: TensorGroup, algorithm: str) -> "TorchLayer":
        own = expert_share(self.module, self.experts, group, algorithm)
        if not own.served:
            return self
        if both := sorted(own.served & self.tied.keys()):
            raise ValueError(
                f"needs {both[0]} of an earlier part, as routers read what its experts have made; "
                "cut behind each block, as cuts='model.layers'"
            )
        found = self._as(own)
        trained = {name for name, _ in found._trained()}
        found.placed = {name: rank for name, rank in own.owners.items() if name in trained}
        found.spread = own.stacked & trained
        return found

    def _as(self, own: Share) -> "TorchLayer":
        """The layer whose module is a share of this one's."""
        watched = self._watched
        takes, training = watched.takes, watched.training
        found = TorchLayer(own.module, watched.name, self.prefix, takes=takes, training=training)
        found._given, found._alone = self._given, self
        found._watched.verdict.compares, found.mixes = True, self.mixes
        found._share, found._watched.region = own, own.region
        found.whole, found.tied, found._filler = self.whole, self.tied, self._filler
        found.split = {name: axis for name, (axis, _) in own.axes.items()}
        found.fused = {name: blocks for name, (_, blocks) in own.axes.items()}
        found._watched.only_loss, found._watched.state = watched.only_loss, watched.state
        found.moving, found.trained_names = self.moving, self.trained_names
        found._watched.draws.part = own.region.group.rank if own.axes else 0
        return found

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
        """Buffers and frozen parameters."""
        for name, one in named_tensors(self.module).items():
            if not (isinstance(one, torch.nn.Parameter) and one.requires_grad):
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
        if key not in self._known:
            self._known[key] = self._asked(shape)
        return self._known[key]

    def _asked(self, shape: Shape) -> Shape:
        """As :meth:`output_shape`, by a run of the module."""
        kind = next((p.dtype for p in self.module.parameters()), torch.get_default_dtype())
        refused: Exception | None = None
        for value, dtype in ((0, kind), (0, torch.int64), (1, kind), (1, torch.int64)):
            wide = as_array(torch.ones(0, dtype=dtype)).dtype
            sample = tensors_of(zeros(2, shape, wide), kind)  # one would mix with nothing
            try:
                found = self._tried({name: part.fill_(value) for name, part in sample.items()})
                self._filler = value
                return found
            except MISFITS as error:
                refused = refused or error
        text = f"it cannot take a sample of shape {shape!r}: {one_line(refused)}"
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
        expect_outputs(found)
        if "" in found:
            return tuple(found[""].shape[1:])
        return Fields(joined({name: as_array(part) for name, part in found.items()}).dtype)

    @torch.no_grad()
    def _moved_by(self, x: Tensors) -> tuple[Tensors, Tensors]:
        """Outputs for a sample in training mode, and what changes of copies of the constants."""
        watched, before = self._watched, dict(self._constants())
        set_context(self.module, RESTING, np, counts=True)
        watched.norm.begin(RESTING, np, counts=True)
        watched.state = frozenset(before)  # any of them may be
        try:
            with untouched(self.module), watched.in_mode(training=True):
                fresh = {name: one.clone() for name, one in x.items()}
                found = watched({name: one.clone() for name, one in before.items()}, fresh)
        finally:
            watched.state = frozenset()
        note_inputs(watched, fresh)
        if not watched.drew:  # no further trial is needed
            watched.modes.discard(True)
            watched.seen.add(True)
        self.mixes = self.mixes or bool(watched.norm.is_called)
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
        own = {n: b.double() for n, b in self._constants() if n in self._watched.state}
        return {name: as_array(values).astype(dtype) for name, values in own.items()} | {
            f"{name}.{own}" if name else own: values
            for name, part in stand_ins(self.module)
            for own, values in part.state(dtype).items()
        }

    def forward(
        self, parameters: Parameters, x: Array, context: Context = RESTING
    ) -> tuple[Array, Any]:
        with on_stream_of(x), without_autocast(self._watched):
            return self._forward(parameters, x, context)

    def _forward(self, parameters: Parameters, x: Array, context: Context) -> tuple[Array, Any]:
        watched = self._watched
        own = {name: as_tensor(v).requires_grad_() for name, v in parameters.items()}
        own = self.lent.take(own, training=context.training)
        expect_the_same_trained(watched, self._given, own.keys())
        xp, counts = array_namespace(x), len(x) > 0
        if not counts:
            x = filled(x, 1, self._filler)
        context = self._in_place(context, len(x))
        kinds = (*self._types.values(), *(p.dtype for p in own.values()))
        kind = next((one for one in kinds if one.is_floating_point), None)
        given = tensors_of(fields(x), kind, every=bool(self._types))
        like = next(iter([*own.values(), *given.values()]))
        buffers = {name: one.clone() for name, one in self._buffers(like)}
        for name, kept in watched.beginning(context).items():
            buffers[name] = as_tensor(kept).to(buffers[name])
        values = {
            name: value.to(self._types.get(name, value.dtype))
            for name, value in (own | buffers).items()
        }
        call = Call(watched, values, given, context, xp, counts)
        self._forwards += 1
        used = [values[name] for name in own]
        with expect_unchanged(watched, used, bitwise=is_due(self._forwards)):
            if self._alone and counts and watched.verdict.compares:
                self._examine(call, self._alone)
            if counts and context.training not in watched.seen:
                self._learn(call)
            for part in given.values():
                part.requires_grad_(part.is_floating_point())
            known = {f"{self.prefix}{name}": one for name, one in own.items()}
            known |= {f"the input {n} of {watched.name}": part for n, part in given.items()}
            for name, one in known.items():
                vars(one)["trained_as"] = name
            y = call(self._learn)
        if name := stray(y, known, self.trained_names):
            watched.say(
                f" follows from {name} by another way than its inputs, whose gradient would be "
                "lost; hand it on as an output and an input, or put both parts into one module"
            )
        for name, one in self._buffers(like) if is_due(self._forwards) else ():
            if name not in watched.state and not same(one, watched.constants.get(name, one)):
                watched.say(changes(name))
        watched.keep(context, xp)
        saved = Pass(call, own, y, call.again(), self._share.served)
        found = joined({name: as_array(part, xp) for name, part in y.items()})
        return found if counts else found[:0], saved

    def _examine(self, call: Call, alone: "TorchLayer") -> None:
        """Compare this rank's share, on its first batch, with the whole module."""
        comparison = Comparison(self._share, call, alone._watched)
        comparison.expect_same(training=False)
        for training in (True, False):
            self._learn(call.of(training=training, samples=np.arange(len(call))))
        comparison.expect_same(training=True)
        self._watched.verdict.compares = False

    def _learn(self, call: Call) -> None:
        with untouched(self.module), self._share.region.being(is_apart=True):
            learn(call)

    def _in_place(self, context: Context, count: int) -> Context:
        """The context with the names of places in the whole module, and with numbers of samples.

        Raises:
            ValueError: the context has other samples than so many.
        """
        samples = context.samples if len(context.samples) else np.arange(count)
        if len(samples) != count:
            raise ValueError(f"the context has {len(samples)} samples, and the input {count}")
        is_part = context.path in ((), (self._watched.name,))
        inside = self.prefix.rstrip(".")
        path = ((inside,) if inside else ()) if is_part else context.path
        return replace(context, samples=samples, path=path)

    def backward(self, parameters: Parameters, saved: Pass, dy: Array) -> tuple[Array, Any]:
        with on_stream_of(dy):
            return saved.backward(dy, meets=bool(self._share.served) or self.mixes)

    def gradients(self, parameters: Parameters, kept: Any) -> Gradients:
        return {
            name: None if g is None else as_array(g, array_namespace(parameters[name]))
            for name, g in self.lent.give(kept).items()
        }

    def _buffers(self, like: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Constants, or this rank's parts, in this tensor's type if all have one."""
        for name, constant in self._constants():
            here = moved(self._moved, name, constant, like.device)
            part = self._share.part(name, here)
            both = part.is_floating_point() and like.is_floating_point() and not self._types
            yield name, part.to(like.dtype if both else part.dtype)
