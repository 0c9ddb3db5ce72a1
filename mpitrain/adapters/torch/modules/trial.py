"""Trial runs of a module that is to be cut: what is called, and what follows from what."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from mpitrain.adapters.torch.arrays import named_tensors
from mpitrain.adapters.torch.checks.module_class import ImpureModule, moves, untouched
from mpitrain.adapters.torch.checks.probe import (
    Tensors,
    arguments,
    having,
    options,
    outputs_of,
)
from mpitrain.adapters.torch.modules.dataflow import Dataflow, DrawnNumbers, Origins, tensors

#: Samples of the two runs, from which shapes for any number of samples follow.
FEW, MANY = 2, 3


class Shape(NamedTuple):
    """The shape of a tensor for any number of samples, from those for few and many."""

    few: Sequence[int]
    many: Sequence[int]
    kind: torch.dtype

    @property
    def has_rows(self) -> bool:
        """Whether the first axis has a row for each sample, or one for all of them."""
        return (*self.few[:1], *self.many[:1]) in ((FEW, MANY), (1, 1))

    def absent(
        self, samples: int, lengths: Mapping[int, int], device: torch.device
    ) -> torch.Tensor:
        """:func:`absent` for so many samples, of other lengths than those in the trial."""
        both = zip(self.few, self.many, strict=True)
        sizes = [
            few + (many - few) * (samples - FEW) // (MANY - FEW)
            if few != many
            else lengths.get(many, many)
            for few, many in both
        ]
        return absent(sizes, self.kind, device)


class Result:
    """The result of a module in any form; for any number of samples, tensors are :class:`Shape`."""

    def __init__(self, leaves: Sequence[Any], structure: TreeSpec) -> None:
        self.leaves, self.structure = leaves, structure

    def __deepcopy__(self, memo: dict[int, Any]) -> "Result":
        return self

    def of(
        self,
        samples: int,
        tensors: Mapping[int, torch.Tensor],
        lengths: Mapping[int, int],
        device: torch.device,
    ) -> Any:
        """The result with these tensors in their places, and without numbers in others.

        Padding gives samples other lengths than in the trial; ``lengths`` has them by those there.
        """
        leaves = [
            one.absent(samples, lengths, device) if isinstance(one, Shape) else one
            for one in self.leaves
        ]
        for place, tensor in tensors.items():
            leaves[place] = tensor
        return tree_unflatten(leaves, self.structure)

    def in_any_size(self, few: "Result") -> "Result | None":
        """This result for any number of samples, from that of few; None: it has another form."""
        if len(few.leaves) != len(self.leaves):
            return None
        leaves: list[Any] = []
        for one, other in zip(few.leaves, self.leaves, strict=True):
            both = isinstance(one, torch.Tensor), isinstance(other, torch.Tensor)
            if both == (True, True) and one.dim() == other.dim():
                leaves.append(Shape(one.shape, other.shape, other.dtype))
            elif any(both):
                return None
            else:  # an object that may change, as a cache, would keep what this run has put in
                leaves.append(other if isinstance(other, (bool, int, float, str)) else None)
        return Result(leaves, self.structure)


class Crossing(NamedTuple):
    """A tensor that may go from part to part.

    Attributes:
        place: name of one of the module's inputs, or number in the result of a module.
        part: number of the part that this module ends; None: an input.
    """

    place: str | int
    part: int | None = None

    @property
    def field(self) -> str:
        """Name in the record that goes from part to part."""
        return f"given_{self.place}" if self.part is None else f"made_{self.part}_{self.place}"


class OnlyCall(NamedTuple):
    """The only call of a module.

    Attributes:
        module: the module.
        end: number of the part that it ends; None: it ends none.
        result: its result.
    """

    module: nn.Module
    end: int | None
    result: Result


class Trial:
    """Runs of a module on few and on many samples, in training, with its dropout at rest.

    Attributes:
        module: the module.
        calls: calls of modules that are called once, in the order in which they end.
        crossing: tensors that go into each part, and none behind the last one.
    """

    def __init__(self, module: nn.Module, after: Sequence[str], inputs: Tensors) -> None:
        """Run it.

        Args:
            module: the module.
            after: names of the modules that end parts.
            inputs: inputs for many samples.

        Raises:
            ValueError: it cannot be cut there.
            ImpureModule: a batch norm would be in two parts.
        """
        self.module, self._after, self._inputs = module, after, inputs
        ends = {id(module.get_submodule(name)): n for n, name in enumerate(after)}
        few = _TrialRun(module, ends, {name: one[:FEW] for name, one in inputs.items()})
        many = _TrialRun(module, ends, inputs)
        if [ends[key] for key in few.ended] != list(range(len(after))) or few.ended != many.ended:
            found = ", ".join(after[ends[key]] for key in many.ended)
            raise ValueError(
                f"cuts = {list(after)} are not in the order in which they are called, once each: "
                f"{found or 'none is called'}"
            )
        self._needs = many.needs
        before: set[int] = set()
        for number, name in enumerate(after):
            # All that its last module has, as other samples may need other parts of it.
            part = module.get_submodule(name)
            own = {id(one) for one in (*part.modules(), *part.parameters(), *part.buffers())}
            self._needs[number] |= own - before
            before |= own
        # In evaluation, others may be read: torch's fast paths take a mask that is a hint before.
        between = {id(buffer) for buffer in module.buffers()} - before
        self._needs = [need | between for need in self._needs]
        self.calls = [
            OnlyCall(part, ends.get(id(part)), result)
            for part, found in many.once.items()
            if part in few.once and (result := found.in_any_size(few.once[part])) is not None
        ]
        if len([call for call in self.calls if call.end is not None]) < len(after):
            raise ValueError(
                f"cuts = {list(after)}: one of them gives results of another form for {FEW} "
                f"samples than for {MANY}; cut elsewhere"
            )
        self.crossing = [self._crossing_into(number, inputs) for number in range(len(after) + 2)]
        self._check()

    def needs(self, number: int, one: object) -> bool:
        """Whether a part needs a parameter, a buffer or a module.

        The first part has what none needs.
        """
        users = [n for n, need in enumerate(self._needs) if id(one) in need]
        return number in (users or [0])

    def shape(self, one: Crossing) -> Shape:
        """The shape of a tensor that crosses a cut."""
        if one.part is None:
            many = self._inputs[str(one.place)]
            return Shape(many[:FEW].shape, many.shape, many.dtype)
        (result,) = (call.result for call in self.calls if call.end == one.part)
        found: Shape = result.leaves[int(one.place)]
        return found

    def left_out(self, number: int) -> list[OnlyCall]:
        """Calls before the begin of a part that end earlier ones, or that it does not need."""
        found: list[OnlyCall] = []
        for call in self.calls if number else ():
            if call.end is not None or id(call.module) not in self._needs[number]:
                found.append(call)
            if call.end == number - 1:
                break
        return found

    def _crossing_into(self, number: int, inputs: Tensors) -> list[Crossing]:
        """The tensors that this part or later ones need and do not make."""
        needed: Origins = frozenset().union(*self._needs[number:])
        made = [
            Crossing(place, call.end)
            for call in self.calls
            if call.end is not None and call.end < number
            for place in range(len(call.result.leaves))
        ]
        return [one for one in (*made, *map(Crossing, inputs)) if one in needed]

    def _check(self) -> None:
        for number, name in enumerate(self._after, 1):
            made = [one for one in self.crossing[number] if one.part is not None]
            if not made:
                raise ValueError(
                    f"cuts: nothing that is computed before {name!r} is used behind it"
                )
            for one in made:
                shape = self.shape(one)
                if not shape.has_rows:
                    raise ValueError(
                        f"cuts: {self._after[one.part or 0]!r} gives a tensor of shape "
                        f"{tuple(shape.many)} for {MANY} samples, and samples must be the first "
                        "axis of what goes to another stage; cut elsewhere"
                    )
        for name, part in self.module.named_modules():
            users = [n for n, need in enumerate(self._needs) if id(part) in need]
            if len(users) > 1 and moves(part, self.module.training):
                raise ImpureModule(
                    f"part{users[1]}.{name} ({type(part).__name__}) is in part{users[0]}, too, and "
                    "has one running mean and variance; cut before it, or behind what it gives"
                )
        drawn = [one for need in self._needs for one in need if isinstance(one, DrawnNumbers)]
        if len(drawn) != len(set(drawn)):
            raise ImpureModule(
                "cuts: random numbers are drawn between the modules behind which it is cut, and "
                "used in two parts; draw them in modules, and cut behind these"
            )


class _TrialRun:
    """One run of a module.

    Attributes:
        ended: the modules that end parts, by address, in the order in which they were left.
        needs: origins of the result of each part: inputs, results of modules that end parts, and
            parameters, buffers and other modules by their addresses.
        once: results of the modules that were called once.
    """

    def __init__(self, module: nn.Module, ends: Mapping[int, int], inputs: Tensors) -> None:
        self._ends, self._flow = ends, Dataflow()
        self._seen: list[tuple[nn.Module, Result]] = []
        self.ended: list[int] = []
        self.needs: list[Origins] = []
        given = {name: one.clone() for name, one in inputs.items()}
        every = named_tensors(module)
        kept = {n: one.detach().clone() for n, one in every.items() if not one.requires_grad}
        for name, one in given.items():
            self._flow.add(one, frozenset([Crossing(name)]))
        for name, one in every.items():
            for tensor in (one, kept.get(name, one)):
                self._flow.add(tensor, frozenset([id(one)]))
        inner = [part for part in module.modules() if part is not module]
        hooks = [part.register_forward_hook(self._behind) for part in inner]
        hooks += [p.register_forward_pre_hook(self._before) for p in inner if id(p) in ends]
        try:
            with untouched(module), self._flow:
                module.train()
                for part in inner:
                    if isinstance(part, nn.modules.dropout._DropoutNd):
                        part.eval()  # it draws the same numbers in all parts
                args, kwargs = arguments(given, options(module))
                with having(module, kept):
                    found, _ = outputs_of(module(*args, **kwargs))
        finally:
            for hook in hooks:
                hook.remove()
        calls = Counter(part for part, _ in self._seen)
        self.once = {part: result for part, result in self._seen if calls[part] == 1}
        self.needs.append(self._flow.of(tensors(found)) | self._flow.steering)

    def _before(self, part: nn.Module, given: Any) -> None:
        self._steering = self._flow.steering

    def _behind(self, part: nn.Module, given: Any, result: Any) -> Any:
        leaves, structure = tree_flatten(result)
        for one in tensors(leaves):
            self._flow.add(one, frozenset([id(part)]))
        in_vmap = any(map(self._flow.is_wrapped, tensors(leaves)))  # for samples one by one
        self._seen += [(part, Result(leaves, structure))] * (2 if in_vmap else 1)
        if id(part) not in self._ends:
            return None
        self.needs.append(self._flow.of(tensors(leaves)) | self._flow.steering)
        self._flow.steering = self._steering  # later parts do not run its code
        fresh = [one.clone() if isinstance(one, torch.Tensor) else one for one in leaves]
        for place, one in enumerate(fresh):
            if isinstance(one, torch.Tensor):
                self._flow.begin(one, Crossing(place, len(self.ended)))
        self.ended.append(id(part))
        return tree_unflatten(fresh, structure)


def absent(
    shape: Sequence[int], kind: torch.dtype, device: torch.device | None = None
) -> torch.Tensor:
    """A tensor from which no result follows: of NaN if possible, in the memory of one number."""
    value = torch.nan if kind.is_floating_point or kind.is_complex else 0
    return torch.full((), value, dtype=kind, device=device).expand(tuple(shape))
