"""A torch module as a layer of the trainer."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
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
    on_stream_of,
    tensors_of,
)
from mpitrain.adapters.torch.checks.module import (
    Watched,
    examine,
    expect_given_values,
    expect_the_same_trained,
)
from mpitrain.adapters.torch.checks.module_class import is_held, keeps_running, refuse
from mpitrain.adapters.torch.checks.probe import (
    call_with,
    expect_outputs,
    is_due,
    one_line,
    options,
)
from mpitrain.adapters.torch.stand_ins import set_context, stand_ins, with_stand_ins
from mpitrain.arrays import Array, Gradients, Parameters, Shape, array_namespace
from mpitrain.fields import Fields, as_given, fields, joined, partial, unused, zeros
from mpitrain.nn import Layer
from mpitrain.nn.context import RESTING, Context
from mpitrain.nn.layer import Verdict


class TorchLayer(Layer):
    """A module as a layer, for pipelines, ZeRO, checkpoints and all else.

    The parameters of a call become the module's for the call, on the CPU or a GPU; nothing is
    copied.  Stand-ins replace torch's dropout and batch norm: masks depend on seed, step, layer and
    sample, and moments are over the batch of all replicas.  Otherwise, a module must be a function
    of its parameters and its input.  A module that is random, changes buffers, mixes the samples of
    a batch or depends on ``.training`` is refused: by its class when the layer is made, by a trial
    at its first batch (:func:`mpitrain.adapters.torch.checks.module.examine`), and by a watch on
    torch's generator and the buffers at each batch.  Constant buffers and frozen parameters are
    cast as the parameters are, and keep their values.

    A module need not take an empty batch: on a rank without samples, it is called with a sample of
    zeros that counts nowhere, so that it still meets the other ranks in batch norm.

    Attributes:
        module: the module, with stand-ins.
        prefix: prefix of the parameters' names in the whole module.
        whole: module whose constants this layer reports: its own, or the one that it and the layers
            after it are parts of; None for these other layers.
        drawn_as: name of the layer whose random numbers it draws: parts of a module that was cut
            repeat what is between them, and draw as the whole module would; None: its own.
    """

    drawn_as: str | None = None

    holds = True  # autograd's saved tensors are the parameters' memory

    def __init__(
        self,
        module: torch.nn.Module,
        name: str = "the module",
        prefix: str = "",
        *,
        in_turn: bool = False,
        training: bool | None = None,
    ) -> None:
        """Make it a layer.

        Args:
            module: the module.
            name: name of the module in errors.
            prefix: prefix of the parameters' names in the whole module.
            in_turn: whether several inputs come as one tuple or dictionary, as in a
                ``torch.nn.Sequential``, rather than as arguments.
            training: mode of the whole module, within which parts may be held in another one.

        Raises:
            ImpureModule: the module cannot be a layer.
        """
        self._given = module
        self.whole: torch.nn.Module | None = module
        module = with_stand_ins(module, module.training if training is None else training)
        self.sees = any(True for _ in stand_ins(module))
        refuse(name, module)
        self.module = module
        self.prefix = prefix
        self._in_turn = in_turn
        self._options = options(module)
        self._watched = Watched(name, module)
        self._forwards = 0
        self._filler = 0
        self._moved: Moved = {}

    def parameters(
        self, rng: np.random.Generator, xp: ModuleType, dtype: DTypeLike
    ) -> dict[str, Array]:
        """The values in the module; ``rng`` is not used."""
        values = {name: as_array(p.double()).astype(dtype) for name, p in self._trained()}
        return {name: xp.asarray(array) for name, array in values.items()}

    def shapes(self) -> dict[str, Shape]:
        return {name: tuple(p.shape) for name, p in self._trained()}

    def _trained(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        return ((name, p) for name, p in self.module.named_parameters() if p.requires_grad)

    def _constants(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Buffers and frozen parameters."""
        yield from self.module.named_buffers()
        frozen = ((name, p) for name, p in self.module.named_parameters() if not p.requires_grad)
        yield from ((name, p.detach()) for name, p in frozen)

    def brought(self) -> dict[str, Array]:
        """The bytes of parameters and buffers."""
        named = [*self.module.named_parameters(), *self.module.named_buffers()]
        return {name: as_bytes(tensor) for name, tensor in named}

    def constants(self) -> dict[str, torch.Tensor]:
        """Frozen parameters and constant buffers of :attr:`whole`, under all of their names."""
        if self.whole is None:
            return {}
        kept = {
            id(buffer)
            for part in self.whole.modules()
            if keeps_running(part) and not is_held(part, self.whole.training)
            for buffer in part.buffers()
        }
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
        kind = next((p.dtype for p in self.module.parameters()), torch.get_default_dtype())
        refused: Exception | None = None
        for value, dtype in ((0, kind), (0, torch.int64), (1, kind), (1, torch.int64)):
            wide = as_array(torch.ones(0, dtype=dtype)).dtype
            sample = tensors_of(zeros(1, shape, wide), kind)
            try:
                found = self._tried({name: part.fill_(value) for name, part in sample.items()})
                self._filler = value
                return found
            except (RuntimeError, ValueError, TypeError, IndexError) as error:
                refused = refused or error
        text = f"it cannot take a sample of shape {shape!r}: {one_line(refused)}"
        raise ValueError(text) from refused

    @torch.no_grad()
    def _tried(self, x: Mapping[str, torch.Tensor]) -> Shape:
        """Shape of the output for one sample; buffers and the generator stay as they are."""
        buffers = {name: b.clone() for name, b in self.module.named_buffers()}
        with torch.random.fork_rng(devices=[]):
            values = {f"module.{name}": buffer for name, buffer in buffers.items()}
            found = call_with(self._watched, values, *self._arguments(x))
        expect_outputs(found)
        if "" in found:
            return tuple(found[""].shape[1:])
        return Fields(joined({name: as_array(part) for name, part in found.items()}).dtype)

    def _arguments(self, values: Mapping[str, torch.Tensor]) -> tuple[tuple[Any, ...], Any]:
        """Positional and keyword arguments of the module."""
        if self._in_turn or "" in values:
            return (as_given(values),), self._options
        return (
            (tuple(values.values()), self._options)
            if "0" in values
            else ((), {**values, **self._options})
        )

    def give_only_loss(self) -> None:
        """Leave all outputs but the module's own loss out, if it has one."""
        self._watched.only_loss = True

    def verdicts(self) -> list[Verdict]:
        return [self._watched.verdict]

    def state(self, dtype: DTypeLike) -> dict[str, Array]:
        """Running values of batch norm, under the names of its buffers."""
        return {
            f"{name}.{own}" if name else own: values
            for name, part in stand_ins(self.module)
            for own, values in part.state(dtype).items()
        }

    def forward(
        self, parameters: Parameters, x: Array, context: Context = RESTING
    ) -> tuple[Array, Any]:
        casting = list(filter(torch.is_autocast_enabled, ("cpu", "cuda")))
        if casting:
            self._watched.say(
                ": torch.autocast is on around the trainer, which would not be on in the same "
                "places in every layout; turn it on in the module's forward(), or take "
                "run.compute = 'bfloat16'"
            )
        with ExitStack() as stack:
            stack.enter_context(on_stream_of(x))
            for kind in casting:
                stack.enter_context(torch.autocast(kind, enabled=False))
            return self._forward(parameters, x, context)

    def _forward(self, parameters: Parameters, x: Array, context: Context) -> tuple[Array, Any]:
        if self.drawn_as and context.path:
            context = replace(context, path=(*context.path[:-1], self.drawn_as))
        own = {name: as_tensor(v).requires_grad_() for name, v in parameters.items()}
        expect_the_same_trained(self._watched, self._given, own.keys())
        xp = array_namespace(x)
        counts = len(x) > 0
        if not counts:
            x = xp.full((1, *x.shape[1:]), self._filler, x.dtype)
        given = tensors_of(fields(x), next((p.dtype for p in own.values()), None))
        buffers = self._buffers(own, next(iter(given.values())))
        values = {f"module.{name}": value for name, value in (own | buffers).items()}
        self._forwards += 1
        # These comparisons find changes by way of .data or NumPy, which torch does not count.
        compares = is_due(self._forwards)
        before = [part.detach().clone() for part in own.values()] if compares else []

        def run(*tensors: torch.Tensor) -> dict[str, torch.Tensor]:
            if self._watched.changes_input:
                tensors = tuple(part.clone() for part in tensors)
            arguments = self._arguments(dict(zip(given, tensors, strict=True)))
            found: dict[str, torch.Tensor] = call_with(self._watched, values, *arguments)
            return found

        if counts and not self._watched.verdict.examined:
            set_context(self.module, replace(context, training=False), xp)
            examine(self._watched, run, buffers, list(given.values()))
            modules = (self._given, self.module)
            expect_given_values(
                self._watched.name, modules, run, list(given.values()), list(own.values())
            )
            self._watched.verdict.examined = True
        for part in given.values():
            part.requires_grad_(part.is_floating_point())
        set_context(self.module, context, xp, counts=counts)
        versions = [part._version for part in own.values()]
        y = run(*given.values())
        if versions != [part._version for part in own.values()] or not all(
            np.array_equal(as_bytes(then), as_bytes(now)) for then, now in zip(before, own.values())
        ):
            self._watched.say(
                " changes its parameters in its forward pass, as max_norm does; the replicas of a "
                "sharded one would differ"
            )
        found = joined({name: as_array(part, xp) for name, part in y.items()})
        return found if counts else found[:0], (given, y, own)

    def backward(self, parameters: Parameters, saved: Any, dy: Array) -> tuple[Array, Any]:
        with on_stream_of(dy):
            return self._backward(saved, dy)

    def _backward(self, saved: Any, dy: Array) -> tuple[Array, Any]:
        given, y, own = saved
        xp = array_namespace(dy)
        inputs = {name: part for name, part in given.items() if part.requires_grad}
        left_out = unused(dy)
        outputs = {n: part for n, part in y.items() if part.requires_grad and n not in left_out}
        wanted = [*inputs.values(), *own.values()]
        found: Sequence[torch.Tensor | None] = [None] * len(wanted)
        counts = len(dy) > 0
        if wanted and outputs:
            gradients = (
                tensors_of({name: fields(dy)[name] for name in outputs})
                if counts
                else {name: torch.zeros_like(part) for name, part in outputs.items()}
            )
            found = torch.autograd.grad(
                list(outputs.values()), wanted, list(gradients.values()), allow_unused=True
            )
        used = {n: as_array(g, xp) for n, g in zip(inputs, found, strict=False) if g is not None}
        dx = {
            name: used[name] if name in used else xp.zeros(part.shape, as_array(part, xp).dtype)
            for name, part in given.items()
        }
        kept = dict(zip(own, found[len(inputs) :], strict=True))
        whole = joined(dx)
        if not counts:  # a rank without samples does not use what other ranks do not use
            whole, kept = whole[:0], dict.fromkeys(own)
        left = dx.keys() - used.keys()
        if xp is not np and outputs and left & inputs.keys():
            self._watched.say(
                ": the loss does not follow from its input, so that the layers before it stay as "
                "they are, which the trainer can do on the CPU alone; leave them out, or set "
                "run.device = 'cpu'"
            )
        return partial(whole, left if xp is np else ()), kept

    def gradients(self, parameters: Parameters, kept: Any) -> Gradients:
        return {
            name: None if g is None else as_array(g, array_namespace(parameters[name]))
            for name, g in kept.items()
        }

    def _buffers(
        self, own: dict[str, torch.Tensor], given: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Copies in the type of the parameters, or of the input if there are none."""
        like = next(iter(own.values()), given)
        return {
            name: moved(self._moved, name, b, like.device)
            .to(like.dtype if b.is_floating_point() and like.is_floating_point() else b.dtype)
            .clone()
            for name, b in self._constants()
        }
