"""A torch module as a layer of the trainer."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from mpitrain.adapters.torch.arrays import (
    as_array,
    as_tensor,
    as_tensors,
    on_stream_of,
    same,
    tensors_of,
)
from mpitrain.adapters.torch.checks.module import (
    expect_the_same_trained,
    expect_unchanged,
    learn,
    without_autocast,
)
from mpitrain.adapters.torch.checks.module_class import ImpureModule, untouched
from mpitrain.adapters.torch.checks.probe import is_due
from mpitrain.adapters.torch.checks.share import Comparison
from mpitrain.adapters.torch.functions.lent import mark, stray
from mpitrain.adapters.torch.modules.calls import Call, changes
from mpitrain.adapters.torch.modules.described import TorchModule
from mpitrain.adapters.torch.modules.passes import Pass, PlainPass
from mpitrain.adapters.torch.modules.tensor_parallel import Share, share
from mpitrain.arrays import Array, Gradients, Parameters, array_namespace
from mpitrain.fields import fields, filled, joined
from mpitrain.group import TensorGroup
from mpitrain.nn.context import RESTING, Context


class TorchLayer(TorchModule):
    """A module as a layer, for pipelines, ZeRO, checkpoints and all else.

    The parameters of a call become the module's for the call, on the CPU or a GPU; nothing is
    copied.  Moments of batch norm are over the batch of all replicas.
    Random numbers depend on seed, step, place, sample and position in the sample.  Training is in
    training mode but for parts that are held in evaluation mode, and tests are in evaluation mode.
    Otherwise, a module must be a function of its parameters and its input.  One that changes
    buffers is refused: by its class when the layer is made, and by a watch on torch's generator and
    the buffers at each batch.  The shadow tells of one that mixes the samples of a batch.  Constant
    buffers and frozen parameters are cast as the parameters are, and keep their values;
    :meth:`keep_types` keeps all types.

    A module need not take an empty batch: on a rank without samples, it is called with a sample of
    zeros that counts nowhere, so that it still meets the other ranks in batch norm.
    """

    def shared(self, group: TensorGroup) -> "TorchLayer":
        """The layer as this rank of a tensor group has it; itself, if the group shares nothing.

        Raises:
            ValueError: the ranks cannot share it equally.
        """
        own = share(self.module, self.plan, group)
        return self._as(own) if own.axes else self

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
        found._watched.draws.part = own.region.group.rank
        return found

    def forward(
        self, parameters: Parameters, x: Array, context: Context = RESTING
    ) -> tuple[Array, Any]:
        with on_stream_of(x), without_autocast(self._watched):
            found = self._unwatched(parameters, x, context)
            return found or self._forward(parameters, x, context)

    def _unwatched(
        self, parameters: Parameters, x: Array, context: Context
    ) -> tuple[Array, PlainPass] | None:
        """A pass of one of torch's own modules, which cannot do what :meth:`_forward` watches for.

        None: it may, or this is its first one.
        """
        watched, there = self._watched, vars(self.module)["_parameters"]
        is_tried = watched.is_known and self._forwards and context.training in watched.seen
        if not (is_tried and len(x) and x.dtype.names is None) or self._types or self.lent.names:
            return None
        given = as_tensors({"": x})[""]
        kind = given.dtype, given.device
        held = {name: one for name, one in there.items() if one is not None}
        trained = {name for name, one in held.items() if one.requires_grad}
        frozen = [held[name] for name in held.keys() - trained]
        if trained != parameters.keys() or any((p.dtype, p.device) != kind for p in frozen):
            return None
        own = {name: as_tensor(v).requires_grad_() for name, v in parameters.items()}
        given.requires_grad_(given.is_floating_point() and not self._leads(context))
        mark({f"{self.prefix}{n}": p for n, p in own.items()} | {f"{watched.name}'s input": given})
        there.update(own)
        try:
            y = self.module(given.clone() if watched.changes_input else given)
        finally:
            there.update(held)
        if not isinstance(y, torch.Tensor) or any(one._version for one in own.values()):
            return None
        return as_array(y, array_namespace(x)), PlainPass(own, given, y)

    def _forward(self, parameters: Parameters, x: Array, context: Context) -> tuple[Array, Any]:
        watched = self._watched
        own = {name: as_tensor(v).requires_grad_() for name, v in parameters.items()}
        own = self.lent.take(own, training=context.training)
        expect_the_same_trained(watched, self._given, own.keys())
        xp, counts = array_namespace(x), len(x) > 0
        if not counts:
            x = filled(x, 1, self._filler)
        is_first, leads = self._is_first(context), self._leads(context)
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
                self._examine(call, self._alone, is_first=is_first)
            if counts and context.training not in watched.seen:
                self._learn(call)
            for part in given.values():
                part.requires_grad_(part.is_floating_point() and not leads)
            known = {f"{self.prefix}{name}": one for name, one in own.items()}
            known |= {f"the input {n} of {watched.name}": part for n, part in given.items()}
            mark(known)
            y = call(self._learn, meets=self.mixes or self._alone is not None)
        if name := stray(y, known, self.trained_names):
            watched.say(
                f" follows from {name} by another way than its inputs, whose gradient would be "
                "lost; hand it on as an output and an input, or put both parts into one module"
            )
        for name, one in self._buffers(like) if is_due(self._forwards) else ():
            if name not in watched.state and not same(one, watched.constants.get(name, one)):
                watched.say(changes(name))
        watched.keep(context, xp)
        if any(part.shape[:1] != (len(x),) for part in y.values()):
            shapes, many = (tuple(part.shape) for part in y.values()), "s" * (len(x) > 1)
            raise ImpureModule(
                f"{watched.name} gives outputs of shape {', '.join(map(str, shapes))} for {len(x)} "
                f"sample{many}; the first axis must be the samples, also of one: squeeze(-1), not "
                "squeeze()"
            )
        saved = Pass(call, own, y, call.again())
        found = joined({name: as_array(part, xp) for name, part in y.items()})
        return found if counts else found[:0], saved

    def _examine(self, call: Call, alone: TorchModule, *, is_first: bool) -> None:
        """Compare this rank's share, on its first batch, with the whole module."""
        comparison = Comparison(self._share, call, alone._watched, is_first=is_first)
        comparison.expect_same(training=False)
        for training in (True, False):
            self._learn(call.of(training=training, samples=np.arange(len(call))))
        comparison.expect_same(training=True)
        self._watched.verdict.compares, alone._watched.constants = False, {}

    def _learn(self, call: Call) -> None:
        with untouched(self.module):
            learn(call)

    def _leads(self, context: Context) -> bool:
        """Whether no graph leads to the input, as nobody takes a gradient by it."""
        return self._is_first(context) and self._share.region.group.size == 1

    @staticmethod
    def _is_first(context: Context) -> bool:
        """Whether nobody takes a gradient by the input."""
        return len(context.path) == 1 and context.path[0] in context.leading

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

    def backward(
        self, parameters: Parameters, saved: Pass | PlainPass, dy: Array
    ) -> tuple[Array, Any]:
        with on_stream_of(dy):
            return saved.backward(dy, meets=self.mixes)

    def gradients(self, parameters: Parameters, kept: Any) -> Gradients:
        return {
            name: None if g is None else as_array(g, array_namespace(parameters[name]))
            for name, g in self.lent.give(kept).items()
        }
