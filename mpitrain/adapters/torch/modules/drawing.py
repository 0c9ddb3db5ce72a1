"""Random numbers of torch modules, keyed by seed, step, place, sample and position in the sample.

Each layout of ranks has one process's numbers then, wherever in a module they are drawn.
"""

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from math import prod
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from mpitrain.adapters.torch.modules.distributions import Distributions
from mpitrain.adapters.torch.modules.draws import DrawPlace, Draws, Where, is_composite, may_draw
from mpitrain.arrays import Array, Shape
from mpitrain.nn.context import Context

#: Seed of torch's generator after the first, second ... draw: this number, and those after it.
_MARK = 0x6D70_6974_7261_696E
#: Kernels that draw numbers inside, where nobody can give them others; each has a plain form.
_FUSED = frozenset({
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_fused_attention_overrideable",
    "_flash_attention_forward", "_efficient_attention_forward", "_cudnn_attention_forward",
    "_cudnn_rnn", "miopen_rnn",
})  # fmt: skip


class Drawing(TorchDispatchMode):
    """A forward pass in which each random number is keyed; generators stay as they are.

    :func:`torch.utils.checkpoint.checkpoint` keeps the state of torch's generator.  The pass marks
    that state with the number of draws so far, by which a computation that is repeated, in the
    backward pass or for a gradient within the forward pass, finds the same numbers.

    Attributes:
        shapes: shapes of what was drawn, by place.
        fault: the first draw that cannot be keyed; empty without one.
        repeats: whether the backward pass may draw these numbers once more.
    """

    def __init__(
        self,
        draws: Draws,
        context: Context,
        xp: ModuleType,
        inputs: tuple[Shape, ...],
        unknown: Callable[[], None] | None = None,
        *,
        loud: bool | DrawPlace = False,
    ) -> None:
        """A pass.

        Args:
            draws: the module's draws as far as they are known.
            context: context of the pass, with the place of the module as path.
            xp: namespace of the arrays.
            inputs: shapes of the inputs of one sample.
            unknown: called when numbers are drawn at a place that is not known yet, to find out
                about it; None: all samples share the numbers of such a place.
            loud: whether each number is another one, rather than 0 or 1, where it is to be 1 with
                some probability: a trial sees whose number it is then.  A place: its numbers do,
                and all others are the same.
        """
        super().__init__()
        self._draws, self._context, self._xp, self._inputs = draws, context, xp, inputs
        self._unknown, self._loud = unknown, loud
        self._turns: dict[str, int] = {}
        self._order: list[DrawPlace] = []
        self._again = self._packed = False
        self.shapes: dict[DrawPlace, Shape] = {}
        self.fault, self.repeats = "", False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: the pass runs what is compiled as it was written, and a guard takes its time."""
        return False

    @property
    def drew(self) -> bool:
        """Whether the pass has drawn numbers."""
        return bool(self.shapes or self._draws.plain or self.fault)

    def again(self) -> "Drawing":
        """The pass once more, for parts of it that are computed again in the backward pass."""
        self._again = True
        return self

    def __enter__(self) -> "Drawing":
        generator = torch.default_generator
        self._before = generator.get_state()
        generator.manual_seed(_MARK - 1 if self._again else _MARK)
        self._marked = generator.get_state()
        self._opened = ExitStack()
        if "torch._dynamo" in sys.modules:  # something may be compiled, and would trace the mode
            self._opened.enter_context(torch.compiler.set_stance("force_eager"))
        if self._draws.plain:
            self._opened.enter_context(sdpa_kernel(SDPBackend.MATH))
            self._opened.enter_context(torch.backends.cudnn.flags(enabled=False))
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._opened.close()
        generator = torch.default_generator
        if not self._again and not torch.equal(generator.get_state(), self._marked):
            self.fault = self.fault or "it draws random numbers where torch shows no operator"
        generator.set_state(self._before)

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        self.repeats = self.repeats or is_repeated()
        if not may_draw(operator):
            self._packed |= operator is torch.ops.aten._pack_padded_sequence.default
            return operator(*args, **kwargs)
        if is_composite(operator):  # it comes whole where autograd is off
            super().__enter__()
            try:
                # torch's Python of an LSTM, which operator.decompose() calls, leaves dropout out.
                key = torch._C.DispatchKey.CompositeImplicitAutograd
                return operator._op_dk(key, *args, **kwargs)
            finally:
                super().__exit__(None, None, None)
        given = _bound(operator, args, kwargs)
        whole = operator._schema.name.removeprefix("aten::")
        rests = given.get("train", given.get("training")) is False
        if rests or 0 in (given.get("dropout_p", 1), given.get("dropout", 1)):
            return operator(*args, **kwargs)
        name = whole.removesuffix("_").removesuffix("_like")
        if name in _FUSED:
            self._draws.plain = True
            if self._unknown is None:
                return operator(*args, **kwargs)
            self.fault = self.fault or f"it draws random numbers within the kernel {whole}"
        else:
            numbers = Distributions(self._bits, loud=bool(self._loud)).of(whole, given)
            if numbers is not None:
                return numbers
        self.fault = self.fault or f"it draws random numbers by torch.ops.aten.{whole}"
        state = torch.default_generator.get_state()
        found = operator(*args, **kwargs)
        torch.default_generator.set_state(state)
        return found

    def _bits(self, shape: Shape) -> Array:
        """Integers of 64 bits for the samples and the place of this draw, in one axis."""
        place = self._place()
        self.shapes[place] = shape
        samples = self._context.samples
        if self._loud not in (False, True, place):
            return self._xp.full(prod(shape), 2**63, np.uint64)
        where = self._draws.where.get(place)
        if where is None and self._unknown is not None:
            self._unknown()
            where = self._draws.where.get(place)
        if self._packed and self._draws.is_recurrent(place.name):
            self.fault = self.fault or f"{place.name or 'it'} drops out of packed sequences"
        if where is None or where.of(len(samples)) != shape:
            if self._unknown is not None:
                self.fault = self.fault or (
                    f"{place.name or 'it'} draws random numbers of the shape {shape} for "
                    f"{len(samples)} samples"
                    + (f", and of {where.shape} for one" if where else ", and in a trial none")
                )
            where = Where(shape)
        name = ".".join(filter(None, (*self._context.path, place.name)))
        mode = () if place.training else ("test",)
        keyed = replace(self._context, path=(name, str(place.turn), *mode))
        first = self._draws.first(place, where.shape)
        if first is None:
            self.fault = self.fault or (
                f"{place.name or 'it'} draws random numbers that it did not draw when tensor ranks "
                "were compared with one process"
            )
        if where.axis is None:
            keyed = replace(keyed, samples=np.zeros(1, int))
            return keyed.uniform(shape, self._xp, first).reshape(-1)
        found = keyed.uniform(where.shape, self._xp, first)
        return self._xp.moveaxis(found, 0, where.axis + (not where.together)).reshape(-1)

    def _place(self) -> DrawPlace:
        """The place of this draw; where a computation is repeated, that of the first one."""
        generator = torch.default_generator
        number = generator.initial_seed() - _MARK
        if not self._again and not 0 <= number < len(self._order):
            number = len(self._order)
            name = self._draws.innermost()
            self._turns[name] = self._turns.get(name, 0) + 1
            place = DrawPlace(self._context.training, self._inputs, name, self._turns[name])
            self._order.append(place)
        if not 0 <= number < len(self._order):
            self.fault = self.fault or (
                "its backward pass draws random numbers that its forward pass did not draw, or "
                "torch.utils.checkpoint in it does not keep the state of torch's generator; leave "
                "out preserve_rng_state=False"
            )
            return DrawPlace(self._context.training, self._inputs, "", 0)
        generator.manual_seed(_MARK + number + 1)
        self._marked = generator.get_state()
        return self._order[number]


def _bound(operator: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Arguments of an operator by name, with the defaults of those that were left out."""
    every = operator._schema.arguments
    found = {one.name: one.default_value for one in every if one.has_default_value()}
    return found | dict(zip((one.name for one in every), args, strict=False)) | kwargs


def states_of_generators() -> list[tuple[torch.Generator, torch.Tensor]]:
    """torch's generators and their states: the CPU's, and that of the GPU in use."""
    found = [torch.default_generator]
    if torch.cuda.is_initialized():
        found.append(torch.cuda.default_generators[torch.cuda.current_device()])
    return [(generator, generator.get_state()) for generator in found]


def reset(states: Sequence[tuple[torch.Generator, torch.Tensor]]) -> bool:
    """Takes generators back to these states; returns whether any had moved."""
    moved = [one for one in states if not torch.equal(one[1], one[0].get_state())]
    for generator, state in moved:
        generator.set_state(state)
    return bool(moved)


def is_repeated() -> bool:
    """Whether the backward pass may compute the code that runs once more.

    A checkpoint does, whose hooks are there, and so may a function with a backward pass of its own,
    whose forward pass runs without gradients.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks is not None or not torch.is_grad_enabled()


class Seeded:
    """A pass in which torch's generators begin from a seed of the step and the micro-batch.

    Attributes:
        drew: whether it drew random numbers.
    """

    drew = False

    def __init__(self, context: Context) -> None:
        context = context if context.training else context.inside("test")
        if not len(context.samples):
            context = replace(context, samples=np.zeros(1, int))
        self._seed = int(context.seeds()[0] >> np.uint64(1))

    def __enter__(self) -> None:
        self._before = states_of_generators()
        torch.manual_seed(self._seed)
        self._seeded = states_of_generators()

    def __exit__(self, *raised: Any) -> None:
        self.drew = reset(self._seeded)
        reset(self._before)
