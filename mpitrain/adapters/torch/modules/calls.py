"""Calls of a torch module with given parameters, in a context."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import nn

from mpitrain.adapters.torch.arrays import as_array, named_tensors
from mpitrain.adapters.torch.checks import module_class
from mpitrain.adapters.torch.checks.module_class import ELSEWHERE, ImpureModule, is_held
from mpitrain.adapters.torch.checks.probe import Form, Tensors, arguments, cast, options
from mpitrain.adapters.torch.functions.reductions import COUNT, LOSS, OwnLoss
from mpitrain.adapters.torch.modules.cutting import has_hooks
from mpitrain.adapters.torch.modules.drawing import Drawing, Seeded, reset, states_of_generators
from mpitrain.adapters.torch.modules.draws import DrawPlace, Draws
from mpitrain.adapters.torch.modules.norms import Norms
from mpitrain.adapters.torch.modules.tensor_parallel import Region
from mpitrain.arrays import Array
from mpitrain.nn.context import Context
from mpitrain.nn.layer import Verdict

#: Classes whose passes draw nothing, change no buffer and call no other code.
_KNOWN = frozenset({
    nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding, nn.LayerNorm, nn.GroupNorm,
    nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.MaxPool2d, nn.AvgPool2d, nn.Flatten,
})  # fmt: skip

UNKEYED = "; do without, or set run.random = 'local', which gives each rank torch's own numbers"


class Watched:
    """A module that notices when it changes a buffer or draws random numbers.

    Attributes:
        name: name of the module in errors.
        module: the module.
        training: mode of the whole module, within which parts may be held in another one.
        region: ranks that share the module.
        takes: makes one argument of several inputs; None: they are arguments.
        changes_input: whether the module computes in the place of its input, which belongs to
            another layer; it is given a copy.
        draws: places where the module draws random numbers.
        modes: modes, by ``training``, in which it draws random numbers, or was not tried yet.
        seen: modes in which it has been tried.
        source: origin of the random numbers of the pass.
        state: names of the constants that may change in training.
        drew: whether the latest pass drew numbers of torch's generators that nobody has keyed.
        constants: buffers and frozen parameters behind the latest pass, by name.
        changed: names of those that it changed, as far as torch counts changes.
        own_loss: calls the module.
        norms: takes batch norm.
        only_loss: whether other outputs than the module's own loss are left out.
        narrow, wide: types of all numbers in the outputs of trials and of others, if the module has
            several; None: that in which they are computed.
    """

    def __init__(
        self, name: str, module: nn.Module, training: bool, region: Region, takes: Form | None
    ) -> None:
        self.name, self.module, self.training, self.takes = name, module, training, takes
        self.region = region
        self._options = options(module)
        self.changes_input = any(getattr(part, "inplace", False) for part in module.modules())
        self.draws = Draws(module)
        self.modes, self.seen = {True, False}, set[bool]()
        self.source: AbstractContextManager[Any] = nullcontext()
        self.state: frozenset[str] = frozenset()
        self.drew = False
        self.constants: dict[str, torch.Tensor] = {}
        self.changed: frozenset[str] = frozenset()
        self._has_frozen = not all(p.requires_grad for p in module.parameters())
        self.verdict = Verdict()
        self.own_loss, self.norms = OwnLoss(self.say), Norms(module, training)
        self.only_loss = False
        self.narrow: torch.dtype | None = None
        self.wide: torch.dtype | None = None
        self._begun: tuple[int, dict[str, Array], dict[str, Array]] | None = None
        self._is_first = False
        self._modes = [(part, not is_held(part, training)) for part in module.modules()]
        self._has_own_modes = module_class.has_own_modes(module)

    def say(self, fault: str) -> None:
        """Raise :class:`ImpureModule`, now or later; the text follows the module's name."""
        self.verdict.say(ImpureModule(f"{self.name}{fault}"))

    def __call__(self, values: Tensors, x: Tensors) -> Tensors:
        """The module's outputs by name (:mod:`mpitrain.fields`); generators stay as they are.

        Args:
            values: parameters and buffers, by their names in the module.
            x: the inputs, by name.

        Raises:
            ImpureModule: the module draws random numbers that nobody can key, or gives no tensors.
        """
        with self.norms.having(values):
            self.region.clear()
            return self._forward(*arguments(x, self._options, self.takes))

    @property
    def is_known(self) -> bool:
        """Whether the module is torch's own alone, and has nothing to be watched."""
        is_plain = type(self.module) in _KNOWN and "forward" not in vars(self.module)
        return is_plain and self.region.group.size == 1 and not has_hooks(self.module)

    def _forward(self, args: Any, kwargs: Any) -> Tensors:
        states = states_of_generators()
        before = self._marks()
        with self.source:
            outputs: Tensors = self.own_loss(self.module, args, kwargs)
        self.region.clear()
        self.norms.is_called = bool(self.norms.is_called)
        self.drew = reset(states)
        if fault := getattr(self.module.forward, "fault", ""):  # a part of a module has one
            self.say(f"{fault}; cut elsewhere, or leave cuts out")
        if isinstance(self.source, Drawing) and self.source.fault:
            self.say(f": {self.source.fault}{UNKEYED}")
        after = self._marks()
        self.changed = frozenset(n for n in before | after if before.get(n) != after.get(n))
        for inner in self.changed - self.state:
            self.say(changes(inner))
        if self.only_loss and COUNT in outputs:
            outputs = {name: outputs[name] for name in (LOSS, COUNT)}
        for part in outputs.values():
            if not isinstance(part, torch.Tensor):
                raise ImpureModule(
                    f"{self.name} returns a {type(part).__name__}; a layer returns a tensor, or a "
                    "tuple, list or dictionary of these; of an LSTM, put it into a module that "
                    "gives what is needed: return self.lstm(x)[0]"
                )
        return cast(outputs, self.wide)

    def _marks(self) -> dict[str, tuple[int, int, int]]:
        """Marks of the constants; changes by .data or NumPy in their memory do not show."""
        every = named_tensors(self.module) if self._has_frozen else self.module.named_buffers()
        self.constants = {
            name: one
            for name, one in dict(every).items()
            if not one.requires_grad and name not in self.norms.running
        }
        return {n: (id(one), one._version, one.data_ptr()) for n, one in self.constants.items()}

    def beginning(self, context: Context) -> dict[str, Array]:
        """State as it was when the step began, so that all of its micro-batches have the same."""
        now = {name: context.state[name] for name in self.state if name in context.state}
        if not context.training:
            self._begun = None
            return now
        if self._begun is not None:
            step, left, values = self._begun
            if step == context.step and all(_alike(left[n], now[n]) for n in now):
                return values  # otherwise the step begins again, from a checkpoint
        self._is_first = True
        values = {name: array.copy() for name, array in now.items()}
        self._begun = context.step, dict(values), values
        return values

    def keep(self, context: Context, xp: ModuleType) -> None:
        """Let the context's state follow what the latest pass in training changed.

        All micro-batches of a step must change it alike.
        """
        for name in self.state & context.state.keys():
            kept, now = context.state[name], as_array(self.constants[name], xp)
            if context.training and self._is_first:
                kept[...] = now
                if self._begun is not None:
                    self._begun[1][name] = kept.copy()
            elif context.training and not (kept == now.astype(kept.dtype)).all():
                self.say(changes(name))
            elif not context.training and name in self.changed:
                self.say(f" changes its {name} in a test; let it do so in training alone")
        self._is_first, self.constants = False, {}

    @contextmanager
    def in_mode(self, *, training: bool) -> Iterator[None]:
        """The module is in training or evaluation mode within this block, but for held parts.

        Parts with a train() of their own are in the modes that it sets.
        """
        before = [part.training for part, _ in self._modes]
        if self._has_own_modes:
            self.module.train(training)
        for part, trains in self._modes:  # faster than a module's own
            wanted = part.training if self._has_own_modes else training
            vars(part)["training"] = wanted and trains
        try:
            yield
        finally:
            for (part, _), mode in zip(self._modes, before, strict=True):
                if not training and part.training and id(part) in self.norms.moving:
                    name = self.norms.moving[id(part)]
                    self.say(f".{name} is a batch norm in training mode in a test")
                vars(part)["training"] = mode


def _alike(one: Array, other: Array) -> bool:
    """Whether two arrays have the same numbers, or NaN in the same places."""
    return bool(((one == other) | ((one != one) & (other != other))).all())


def changes(inner: str) -> str:
    """Text about a constant that changes."""
    return (
        f" changes its {inner}, which needs no gradient, in its forward pass, and not by its "
        "parameters alone from the first pass on, so that micro-batches would have several of it; "
        f"keep it constant, {ELSEWHERE}"
    )


@dataclass
class Call:
    """A call of a module with parameters, buffers and a batch; its length counts the samples.

    Attributes:
        watched: the module.
        values: parameters and buffers, by their names in it.
        x: the inputs, by name.
        context: context of the pass.
        xp: namespace of the arrays.
        counts: whether the input has samples, rather than a sample of zeros in the place of none.
    """

    watched: Watched
    values: Tensors
    x: Tensors
    context: Context
    xp: ModuleType
    counts: bool = True

    def __len__(self) -> int:
        return len(self.context.samples)

    def of(self, rows: Any = slice(None), **changed: Any) -> "Call":
        """The call for these samples, on copies of their inputs, with a ``changed`` context."""
        x = {name: part.detach()[rows].clone() for name, part in self.x.items()}
        context = replace(self.context, samples=self.context.samples[rows])
        return replace(self, x=x, context=replace(context, **changed))

    def __call__(self, learn: Callable[["Call"], None], *, meets: bool) -> Tensors:
        """Outputs by name.

        ``learn`` makes trials when random numbers are drawn at a place that is not known.  A pass
        that draws the first ones is made once more, but where it ``meets`` other ranks.
        """

        def unknown() -> None:
            source = self.watched.source
            learn(self)
            self.watched.source = source
            self._begin(self.context)

        self._begin(self.context)
        found = self._run(unknown)
        if self.watched.drew and not meets:
            self.watched.modes.add(self.context.training)
            unknown()
            found = self._run(unknown)
        return self._unkeyed(found)

    def tried(self, *, loud: bool | DrawPlace = False) -> Tensors:
        """Outputs by name, in :attr:`Watched.narrow`; no part in batch norm with other ranks.

        With ``loud``, random numbers show whose they are (:class:`Drawing`).
        """
        self._begin(replace(self.context, training=False))
        return cast(self._unkeyed(self._run(loud=loud)), self.watched.narrow)

    def _unkeyed(self, found: Tensors) -> Tensors:
        """Outputs of a pass that drew no numbers which nobody has keyed."""
        if self.watched.drew:
            self.watched.say(f" draws random numbers, and drew none in a trial{UNKEYED}")
        return found

    def _begin(self, context: Context) -> None:
        """Tell the parts that communicate about the pass."""
        self._begun = context
        self.watched.region.xp = self.xp
        self.watched.norms.begin(context, self.xp, counts=self.counts)
        self.watched.own_loss.step = context.step if context.training else None

    def _run(
        self, unknown: Callable[[], None] | None = None, *, loud: bool | DrawPlace = False
    ) -> Tensors:
        watched, context, x = self.watched, self.context, self.x
        if watched.changes_input:
            x = {name: part.clone() for name, part in x.items()}
        shapes = tuple(tuple(part.shape[1:]) for part in x.values())
        watched.source = nullcontext()
        if context.training in watched.modes:
            watched.source = (
                Drawing(watched.draws, context, self.xp, shapes, unknown, loud=loud)
                if context.keyed
                else Seeded(context)
            )
        values = {**self.values, **{name: self.values[name].clone() for name in watched.state}}
        with watched.in_mode(training=context.training):
            return watched(values, x)

    def again(self) -> AbstractContextManager[None]:
        """For the backward pass of the latest pass, parts of which may be computed once more."""
        return self._again(self.watched.source, self._begun)

    @contextmanager
    def _again(self, source: Any, context: Context) -> Iterator[None]:
        watched = self.watched
        self._begin(replace(context, again=True))
        draws = isinstance(source, Drawing) and source.repeats
        drawn = source.again() if draws else nullcontext()
        mode = watched.in_mode(training=self.context.training)
        states = states_of_generators()
        with watched.norms.having(self.values), mode, drawn:
            yield
        if draws and source.fault:
            watched.say(f": {source.fault}")
        if self.context.keyed and reset(states):
            watched.say(f" draws random numbers in its backward pass alone{UNKEYED}")
