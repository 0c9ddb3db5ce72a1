"""The update of each rank's parameters by the optimiser, and the optimiser's state."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from collectives import Communicator
from mpitrain.arrays import Array, Shape, array_namespace
from mpitrain.config import ConfigError
from mpitrain.optim.groups import Grouping, ParameterGroup
from mpitrain.optim.optimizers import Optimizer
from mpitrain.parallel.store import Allocate, Piece, Store, overlaps
from mpitrain.update.gradient import GlobalGradient

#: The slot of the moving average of parameters, beside those of the optimiser.
AVERAGE = "average"


class _Stretch(NamedTuple):
    """A part of a piece whose elements are all updated in the same way.

    Attributes:
        part: position in the piece.
        group: parameter group, which says how it is updated.
        left_out: number of updates that left this part out.
        shape: shape of the parameter that this part is; None: a part of one, or several.
    """

    part: slice
    group: ParameterGroup
    left_out: int
    shape: Shape | None = None

    def follows(self, other: "_Stretch") -> bool:
        """Whether this stretch begins where the other ends and is updated in the same way."""
        alike = self.group is other.group and self.left_out == other.left_out
        return alike and self.shape is None and self.part.start == other.part.stop

    def of(self, state: Mapping[str, Array]) -> dict[str, Array]:
        """This stretch's part of a piece's state, by slot."""
        return {slot: array[self.part] for slot, array in state.items()}


@dataclass(eq=False)
class Updater:
    """Optimiser state of a store's pieces, and the step.

    The moving average of the parameters is a slot of that state, so that it is sharded, compared
    and saved like the momentum.

    Attributes:
        store: store of the pieces.
        optimizer: optimiser, whose slots the state has.
        grouping: how each tensor is updated.
        gradient: gives the rates of a layerwise optimiser (LARS, LAMB).
        allocate: makes each array, ``allocate(size, dtype)``; None: zeros.
        decay: that of the moving average of parameters, a slot of its own; 0: there is none.
        clip_value: largest absolute value of each number of a gradient; 0: no limit.
        state: arrays by slot, for each piece.
        steps: number of updates.
        per_step: updates in a step, each by a part of its gradient; see :meth:`divide`.
        left_out: number of updates in which a tensor had no part in the loss, by its name.  It
            stays as it is then, state and count of steps included, as in torch.  Updates before the
            run count below 0.
    """

    store: Store
    optimizer: Optimizer
    grouping: Grouping
    gradient: GlobalGradient
    allocate: Allocate | None = None
    decay: float = 0.0
    clip_value: float = 0.0

    def __post_init__(self) -> None:
        store, optimizer = self.store, self.optimizer
        if self.decay and AVERAGE in optimizer.slots:
            raise ConfigError(
                f"optim.average: the optimiser has a slot {AVERAGE!r} of its own; rename it, or "
                "leave optim.average out"
            )
        self.steps, self.per_step = 0, 1
        names = optimizer.begun.keys() & {tensor.name for tensor in store.arena.tensors}
        self.left_out = {name: -optimizer.begun[name].steps for name in names}
        self._latest: tuple[Any, list[list[_Stretch]]] | None = None
        self.state: list[dict[str, Array]] = [
            {slot: _zeros(piece.parameters, self.allocate) for slot in optimizer.slots}
            for piece in store.pieces
        ]
        for piece, state in zip(store.pieces, self.state, strict=True):
            for tensor, part in overlaps(store.arena.tensors, piece):
                if begun := optimizer.begun.get(tensor.name):
                    first = piece.start - tensor.start
                    for slot, whole in begun.slots.items():
                        cut = tensor.part(whole.reshape(tensor.whole)).ravel()
                        own = cut[first + part.start : first + part.stop]
                        state[slot][part] = array_namespace(piece.parameters).asarray(own)
            if self.decay:
                state[AVERAGE] = _zeros(piece.parameters, self.allocate)
                state[AVERAGE][...] = piece.parameters

    def divide(self, per_step: int) -> None:
        """Make each step ``per_step`` updates, by the gradients of its parts one after the other.

        An update takes ``per_step`` times its part of the step's gradient, at a rate divided by
        ``per_step`` (linear scaling rule); the moving average keeps as much in a step as before.
        """
        self.per_step = per_step
        self.decay **= 1 / per_step

    def counts(self) -> tuple[int, dict[str, int]]:
        """Number of updates and ``left_out``, as ranks with one update in a step count them.

        Ranks may divide steps otherwise, now and when the run goes on.  A tensor with more updates
        counts below 0, so that the difference stays the number that its state has taken.
        """
        whole = self.steps // self.per_step
        return whole, self._left_out(self.left_out, whole - self.steps)

    def resume(self, updates: int, left_out: Mapping[str, int]) -> None:
        """Go on from what :meth:`counts` gave on all ranks."""
        self.steps = updates * self.per_step
        self.left_out = self._left_out(left_out, self.steps - updates)

    def _left_out(self, before: Mapping[str, int], more: int) -> dict[str, int]:
        names = [tensor.name for tensor in self.store.arena.tensors]
        found = {name: before.get(name, 0) + more for name in names}
        return {name: count for name, count in found.items() if count}

    def never_used(self, unused: frozenset[str]) -> frozenset[str]:
        """Names of the tensors that the next step does not use and no step before has used."""
        return frozenset(name for name in unused if self.left_out.get(name, 0) == self.steps)

    def slot(self, name: str) -> Array:
        """A slot of the state as a flat array, if the pieces cover the whole arena."""
        # A stage may have no parameters, and no pieces then.
        dtype = self.state[0][name].dtype if self.state else np.float64
        flat = np.empty(self.store.arena.size, dtype)
        for piece, state in zip(self.store.pieces, self.state, strict=True):
            flat[piece.start : piece.stop] = state[name]
        return flat

    def replicas(
        self, groups: Mapping[str, Communicator]
    ) -> list[tuple[Communicator, dict[str, Array]]]:
        """Parameters and optimiser state by name, with the ranks that hold the same."""
        if not self.store.is_replicated:
            return []
        found = []
        for piece, state in zip(self.store.pieces, self.state, strict=True):
            arrays = {}
            for tensor, part in overlaps(self.store.arena.tensors, piece):
                arrays[tensor.name] = piece.parameters[part]
                arrays |= {f"{slot} of {tensor.name}": own[part] for slot, own in state.items()}
            found.append((groups[piece.group], arrays))
        return found

    def step(
        self, lr: float, gradient_scale: float = 1.0, *, step_index: int = 0,
        unused: frozenset[str] = frozenset(),
    ) -> None:  # fmt: skip
        """Update this rank's pieces, but for ``unused`` tensors; ``step_index`` counts all steps.

        ``lr``, that of a step, is multiplied by the rates of groups, and gradients by
        ``gradient_scale``.
        """
        if self.store.reduction.summation.acts_alone:  # residuals may arrive in later steps
            unused = self.never_used(unused)
        self.steps += 1
        lr, gradient_scale = lr / self.per_step, gradient_scale * self.per_step
        for name in unused:
            self.left_out[name] = self.left_out.get(name, 0) + 1
        stretches = self._stretches(unused)
        if self.optimizer.layerwise or self.clip_value:
            self._finish_gradients(gradient_scale)
            gradient_scale = 1.0
        if self.optimizer.layerwise:
            self._step_layerwise(lr, stretches)
        else:
            for piece, state, own in zip(self.store.pieces, self.state, stretches, strict=True):
                for stretch in own:
                    group = stretch.group.at(step_index)
                    p, g = piece.parameters[stretch.part], piece.gradients[stretch.part]
                    if stretch.shape is not None:
                        p, g = p.reshape(stretch.shape), g.reshape(stretch.shape)
                    taken, rate = self.steps - stretch.left_out, lr * group.rate
                    group.optimizer.take_step(p, g, stretch.of(state), taken, rate, gradient_scale)
        self.average()

    def average(self) -> None:
        """Move the averages, if there are any, towards the parameters."""
        if self.decay:
            for piece, state in zip(self.store.pieces, self.state, strict=True):
                state[AVERAGE] += (1.0 - self.decay) * (piece.parameters - state[AVERAGE])

    def _finish_gradients(self, scale: float) -> None:
        """Scale the gradients in place, and clip each of their numbers."""
        limit = self.clip_value
        for piece in self.store.pieces:
            gradients = piece.gradients
            if scale != 1.0:
                gradients[...] *= scale
            if limit:
                array_namespace(gradients).clip(gradients, -limit, limit, out=gradients)

    def _step_layerwise(self, lr: float, stretches: list[list[_Stretch]]) -> None:
        """Update by a layerwise optimiser: all directions first, as the rates need them."""
        pieces = list(zip(self.store.pieces, self.state, stretches, strict=True))
        directions = []
        for piece, state, own in pieces:
            direction = array_namespace(piece.parameters).zeros_like(piece.parameters)
            for stretch in own:
                p, g = piece.parameters[stretch.part], piece.gradients[stretch.part]
                taken, prepare = self.steps - stretch.left_out, stretch.group.optimizer.prepare
                direction[stretch.part] = prepare(p, g, stretch.of(state), taken)
            directions.append(direction)
        rates = self._rates(lr, directions)
        for (piece, state, own), direction, rate in zip(pieces, directions, rates, strict=True):
            for stretch in own:
                p, part = piece.parameters[stretch.part], stretch.part
                stretch.group.optimizer.apply(p, direction[part], stretch.of(state), rate[part])

    def _rates(self, lr: float, directions: list[Array]) -> list[Array]:
        """The rate of each element of each piece, by the norms of whole tensors; collective.

        Servers that have whole tensors replace it.
        """
        return self.gradient.trust_rates(lr, self.grouping, directions)

    def swap_averages(self) -> None:
        """Swap parameters and their averages in this rank's pieces; a second call swaps back."""
        for piece, state in zip(self.store.pieces, self.state, strict=True):
            trained = piece.parameters.copy()
            piece.parameters[...] = state[AVERAGE]
            state[AVERAGE][...] = trained

    def _stretches(self, unused: frozenset[str]) -> list[list[_Stretch]]:
        """The stretches of each piece, reused from the step before if nothing changed."""
        apart = frozenset(entry for entry in self.left_out.items() if entry[0] not in unused)
        if self._latest is None or self._latest[0] != (unused, apart):
            stretches = [self._stretches_of(piece, unused) for piece in self.store.pieces]
            self._latest = (unused, apart), stretches
        return self._latest[1]

    def _stretches_of(self, piece: Piece, unused: frozenset[str]) -> list[_Stretch]:
        """The stretches of a piece, in order, without unused tensors."""
        found: list[_Stretch] = []
        for tensor, part in overlaps(self.store.arena.tensors, piece):
            if tensor.name in unused:
                continue
            left_out = self.left_out.get(tensor.name, 0)
            shape = tensor.shape if self.optimizer.whole else None
            stretch = _Stretch(part, self.grouping(tensor.name), left_out, shape)
            if found and stretch.follows(found[-1]):
                stretch = stretch._replace(part=slice(found.pop().part.start, part.stop))
            found.append(stretch)
        return found


def _zeros(like: Array, allocate: Allocate | None) -> Array:
    if allocate is None:
        return array_namespace(like).zeros_like(like)
    zeros = allocate(like.size, like.dtype)
    zeros[...] = 0
    return zeros
