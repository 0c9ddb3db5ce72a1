"""A mixture of experts: each position goes through the few layers that a router chooses for it.

router -> dispatch -> experts -> combine (Shazeer et al. 2017; GShard, Lepikhin et al. 2020; Switch,
Fedus et al. 2021).  The ranks of a group have some experts each, and samples of their own: rows
travel to their experts and back by two all-to-alls forward and two backward.

Shape suffixes besides those of :mod:`mpitrain.nn`: K choices of a position, X experts, R rows that
travel; a row is a position's features on the way to one of its K experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import Any

import numpy as np

from mpitrain.arrays import Array, Gradients, Parameters, Shape, array_namespace
from mpitrain.group import TensorGroup, share
from mpitrain.kernels.host import total
from mpitrain.nn.chain import Chain, full_name, own_parameters
from mpitrain.nn.context import RESTING, Context, Terms
from mpitrain.nn.layer import Layer, widened
from mpitrain.nn.linear import Linear
from mpitrain.nn.positions import Positions
from mpitrain.nn.sizes import expect_features, expect_sizes


@dataclass(frozen=True)
class Routing:
    """Rules of a router.

    Attributes:
        top: experts that each position goes through, K.
        capacity: an expert takes at most ``ceil(capacity K T / X)`` of a sample's rows, the first
            ones by position, and drops the others: a position adds 0 for a choice that is dropped.
            A sample's drops depend on no other sample, so that all layouts drop the same rows, and
            those of a position depend on no later position.  0: nothing is dropped.
        balance: factor of the loss ``X sum_x f_x P_x`` of each sample, of the part f of its choices
            that fall on an expert and its mean probability P; 1 if all experts are chosen alike.
        router_z: factor of the loss ``mean_t logsumexp(scores_tX)^2`` of each sample, which keeps
            scores small (ST-MoE, Zoph et al. 2022).
    """

    top: int = 2
    capacity: float = 1.25
    balance: float = 0.01
    router_z: float = 0.001

    def choose(self, scores_NTX: Array, cut: Positions | None = None) -> "Choices":
        """Choose experts for each position; collective if other ranks have some of a sample's."""
        xp = array_namespace(scores_NTX)
        largest = scores_NTX.max(axis=-1, keepdims=True)
        exponentials = xp.exp(scores_NTX - largest)
        total = exponentials.sum(axis=-1, keepdims=True)
        p_NTX = exponentials / total
        chosen, left_NTX = [], p_NTX
        for _ in range(self.top):
            chosen.append(left_NTX.argmax(axis=-1))
            is_next_NTX = chosen[-1][..., None] == xp.arange(p_NTX.shape[-1])
            left_NTX = xp.where(is_next_NTX, -1.0, left_NTX)
        chosen_NTK = xp.stack(chosen, axis=-1)
        is_chosen_NTKX = chosen_NTK[..., None] == xp.arange(p_NTX.shape[-1])
        gates_NTK = (is_chosen_NTKX * p_NTX[:, :, None]).sum(axis=-1)
        if self.top > 1:
            gates_NTK = gates_NTK / gates_NTK.sum(axis=-1, keepdims=True)
        logs_NT = (largest + xp.log(total))[..., 0]
        every_NTKX = is_chosen_NTKX
        if cut is not None:
            every_NTKX = cut.gather(chosen_NTK)[..., None] == xp.arange(p_NTX.shape[-1])
        kept_NTK = self._kept(every_NTKX)
        load_NX = every_NTKX.mean(axis=(1, 2), dtype=p_NTX.dtype)
        return Choices(
            p_NTX, logs_NT, chosen_NTK, is_chosen_NTKX, gates_NTK,
            kept_NTK if cut is None else kept_NTK[:, cut.own], load_NX, kept_NTK.shape[1],
        )  # fmt: skip

    def _kept(self, is_chosen_NTKX: Array) -> Array:
        """Whether each choice finds room, in the order of the positions and of their choices."""
        xp = array_namespace(is_chosen_NTKX)
        samples, positions, top, experts = is_chosen_NTKX.shape
        if not self.capacity:
            return xp.ones((samples, positions, top), bool)
        rows = is_chosen_NTKX.reshape(samples, positions * top, experts)
        taken = (rows.cumsum(axis=1) * rows).sum(axis=-1)  # 1 for the first row of an expert
        # Rounding errors do not count: 1.1 times 10 rows are 11.
        most = ceil(round(self.capacity * top * positions / experts, 9))
        return (taken <= most).reshape(samples, positions, top)


@dataclass(frozen=True)
class Choices:
    """Choices of a router for some positions.

    Attributes:
        p_NTX: probability of each expert.
        logs_NT: logarithm of the sum of the scores' exponentials.
        chosen_NTK, is_chosen_NTKX: the experts, by number and as a mask.
        gates_NTK: factors of the experts' outputs; their sum is 1 if K > 1.
        kept_NTK: whether the expert has room for the row.
        load_NX: part of a sample's choices that fall on each expert, dropped ones included.
        positions: positions of a sample, on all ranks that share them.
    """

    p_NTX: Array
    logs_NT: Array
    chosen_NTK: Array
    is_chosen_NTKX: Array
    gates_NTK: Array
    kept_NTK: Array
    load_NX: Array
    positions: int

    def rows(self) -> tuple[Array, Array]:
        """Numbers of the kept choices, expert after expert; rows of each expert, on the host."""
        xp = array_namespace(self.p_NTX)
        to = xp.where(self.kept_NTK, self.chosen_NTK, -1).reshape(-1)
        rows = [xp.nonzero(to == expert)[0] for expert in range(self.p_NTX.shape[-1])]
        return xp.concatenate(rows), np.array([len(one) for one in rows])

    def losses(self, rule: Routing) -> Array:
        """Both losses of each sample, these positions' part, with their factors, shape (N,)."""
        balance_N = (self.load_NX * self.p_NTX.sum(axis=1)).sum(axis=-1) * self.p_NTX.shape[-1]
        z_N = (self.logs_NT**2).sum(axis=1)
        return (rule.balance * balance_N + rule.router_z * z_N) / max(1, self.positions)

    def scores_gradient(self, rule: Routing, dgates_NTK: Array, factor: float) -> Array:
        """Gradient by the scores; ``factor``: that of a sample's losses in the whole loss."""
        top, experts = dgates_NTK.shape[-1], self.p_NTX.shape[-1]
        dchosen_NTK = dgates_NTK
        if top > 1:  # gates are a softmax of the chosen scores alone
            inner = (dgates_NTK * self.gates_NTK).sum(axis=-1, keepdims=True)
            dchosen_NTK = self.gates_NTK * (dgates_NTK - inner)
        found_NTX: Any = (self.is_chosen_NTKX * dchosen_NTK[..., None]).sum(axis=2)
        dscores_NTX, dp_NTX = (found_NTX, 0.0) if top > 1 else (0.0, found_NTX)
        part = factor / max(1, self.positions)
        dp_NTX = dp_NTX + part * rule.balance * experts * self.load_NX[:, None]
        mean_NT1 = (dp_NTX * self.p_NTX).sum(axis=-1, keepdims=True)
        z_NT1 = 2 * part * rule.router_z * self.logs_NT[..., None]
        return dscores_NTX + self.p_NTX * (dp_NTX - mean_NT1 + z_NT1)


class Dispatch:
    """Rows of this rank's samples, expert after expert, to the ranks that have these, and back."""

    def __init__(self, group: TensorGroup, every: Array, algorithm: str) -> None:
        """Nothing is sent.

        Args:
            group: ranks that have some experts each.
            every: rows of each rank's samples for each expert.
            algorithm: as ``Communicator.Alltoallv`` takes it.
        """
        experts, counts_X = every.shape[1], every[group.rank]
        own = group.share(experts)
        here = every[:, own]
        self._group, self._algorithm = group, algorithm
        owners = [share(experts, rank, group.size) for rank in range(group.size)]
        self._sent = [int(counts_X[part].sum()) for part in owners]
        self._received = here.sum(axis=1).tolist()
        self._ends = here.sum(axis=0).cumsum().tolist()
        # Rows arrive rank after rank; an expert's rows become neighbours.
        expert = np.broadcast_to(np.arange(own.stop - own.start), here.shape)
        self._by_expert = np.argsort(np.repeat(expert.reshape(-1), here.reshape(-1)), kind="stable")

    def there(self, rows: Array) -> list[Array]:
        """The rows of all ranks' samples for each of this rank's experts; collective."""
        xp = array_namespace(rows)
        arrived = self._group.exchange_rows(rows, self._sent, self._received, self._algorithm)
        parts: list[Array] = xp.split(arrived[xp.asarray(self._by_expert)], self._ends)
        return parts[:-1]

    def back(self, parts: Sequence[Array], like: Array) -> Array:
        """The rows that the experts made of this rank's rows ``like``; collective."""
        xp = array_namespace(like)
        rows = xp.empty((len(self._by_expert), *like.shape[1:]), like.dtype)
        rows[xp.asarray(self._by_expert)] = xp.concatenate([*parts, like[:0]])
        return self._group.exchange_rows(rows, self._received, self._sent, self._algorithm)


@dataclass
class _Saved:
    """Results of a forward pass.

    Attributes:
        router, experts: saved values of the router, and of each of this rank's experts.
        choices, rows: the router's choices, and numbers of the kept ones, expert after expert.
        dispatch: way of the rows.
        made: output of the expert of each choice, (N T K, D); 0 if it was dropped.
        factor: factor of a sample's losses in the loss whose gradient is taken.
    """

    router: Any
    choices: Choices
    rows: Array
    dispatch: Dispatch
    experts: list[Any]
    made: Array
    factor: float


class Experts(Chain):
    """``y_NTD = sum_k gate_NTk expert_k(x_NTD)`` over the K experts that a router chooses.

    A rank of ``group`` has the parameters of its own experts alone, and computes their gradients
    for the samples of the whole group.  A sample sends 4 K T D (1 - 1/p) numbers in a group of p
    ranks, forward and backward, if choices are even; a forward pass gathers X integers a rank.
    """

    def __init__(
        self, width: int, experts: Sequence[Layer], routing: Routing,
        group: TensorGroup | None = None, tensor: TensorGroup | None = None,
        algorithm: str = "auto",
    ) -> None:  # fmt: skip
        """Nothing is sent.

        Args:
            width: features of a position, D.
            experts: X layers on rows of D features, of which this rank uses its share.
            routing: the rules.
            group: ranks that have a share of the experts each; ``None``: this rank has all.
            tensor: ranks that share each expert, by matrices that are split: x and ``tensor`` are
                alike on them, and each gives one term of y.
            algorithm: algorithm of the all-to-alls of rows.

        Raises:
            ValueError: a position cannot go through so many experts; an expert draws random numbers
                or sees other samples; tensor ranks would all have a whole parameter of an expert.
        """
        expect_sizes("Experts", width=width, experts=len(experts), top=routing.top)
        if routing.top > len(experts):
            raise ValueError(
                f"a position cannot go through {routing.top} of {len(experts)} experts"
            )
        # The router is drawn last: with one expert, the layers around have the bits of a dense one.
        router = Linear(width, len(experts), bias=False, deviation=0.02)
        super().__init__({**{str(x): one for x, one in enumerate(experts)}, "router": router})
        if self.sees:
            raise ValueError("an expert cannot see the context of rows that come from many samples")
        self.sees, self.adds_losses = True, bool(routing.balance or routing.router_z)
        self.width, self.routing, self.algorithm = width, routing, algorithm
        self.group, self.tensor = group or TensorGroup(), tensor or TensorGroup()
        owners = [
            rank
            for rank in range(self.group.size)
            for _ in range(*share(len(experts), rank, self.group.size).indices(len(experts)))
        ]
        self.placed = {
            full_name(str(x), own): owners[x]
            for x, one in enumerate(experts)
            for own in one.shapes()
        }
        whole = [name for name in self.placed if name not in self.split]
        if whole and self.tensor.size > 1:
            raise ValueError(f"{whole[0]} of an expert must be split among the tensor ranks")
        self.summed = frozenset({"router.weight"})
        self._own = [str(x) for x, rank in enumerate(owners) if rank == self.group.rank]
        self._served = Chain({name: self.layers[name] for name in (*self._own, "router")})

    def output_shape(self, shape: Shape) -> Shape:
        expect_features("mixture of experts", self.width, shape)
        for name, layer in self.layers.items():
            if name != "router" and (found := layer.output_shape(shape)) != shape:
                raise ValueError(f"expert {name} makes {found} of {shape}, and must not")
        return shape

    def forward(
        self, parameters: Parameters, x: Array, context: Context = RESTING
    ) -> tuple[Array, _Saved]:
        positions, top = prod(x.shape[1:-1]), self.routing.top
        x_NTD = x.reshape(len(x), positions, self.width)
        scores, router = self.layers["router"].forward(own_parameters(parameters, "router"), x_NTD)
        choices = self.routing.choose(widened(scores), context.positions)
        rows, counts = choices.rows()
        dispatch = Dispatch(self.group, self.group.all(counts), self.algorithm)
        rows_RD = x_NTD.reshape(-1, self.width)[rows // top]
        outputs, saved = [], []
        for name, arrived in zip(self._own, dispatch.there(rows_RD), strict=True):
            y, memory = self.layers[name].forward(own_parameters(parameters, name), arrived)
            outputs.append(y)
            saved.append(memory)
        made = array_namespace(x).zeros((len(x) * positions * top, self.width), x.dtype)
        made[rows] = dispatch.back(outputs, rows_RD)
        gates = choices.gates_NTK[..., None].astype(x.dtype)
        y_NTD = total(gates * made.reshape(len(x), positions, top, self.width), axis=2)
        factor = self._add_losses(choices, context)
        memory = _Saved(router, choices, rows, dispatch, saved, made, factor)
        return y_NTD.reshape(x.shape), memory

    def _add_losses(self, choices: Choices, context: Context) -> float:
        """Add the losses of the samples to the step's; returns the factor of their gradient."""
        terms: Terms | None = context.terms
        if terms is None:
            return 0.0
        if not context.again:
            terms.add(choices.losses(self.routing).sum())
        # Each tensor rank gives one term of the gradient by x.
        return terms.share * terms.scale if self.tensor.rank == 0 else 0.0

    def backward(self, parameters: Parameters, saved: _Saved, dy: Array) -> tuple[Array, Any]:
        xp, choices, top = array_namespace(dy), saved.choices, self.routing.top
        samples, positions, _ = choices.p_NTX.shape
        dy_NT1D = dy.reshape(samples, positions, 1, self.width)
        made_NTKD = saved.made.reshape(samples, positions, top, self.width)
        dgates_NTK = (widened(made_NTKD) * widened(dy_NT1D)).sum(axis=-1)
        dmade = (choices.gates_NTK[..., None].astype(dy.dtype) * dy_NT1D).reshape(-1, self.width)
        drows_RD = dmade[saved.rows]
        slopes, kept = [], []
        arrived = saved.dispatch.there(drows_RD)
        for name, memory, own in zip(self._own, saved.experts, arrived, strict=True):
            dx, rest = self.layers[name].backward(own_parameters(parameters, name), memory, own)
            slopes.append(dx)
            kept.append(rest)
        dmade = xp.zeros_like(dmade)
        dmade[saved.rows] = saved.dispatch.back(slopes, drows_RD)
        dx_NTD = total(dmade.reshape(samples, positions, top, self.width), axis=2)
        dscores = choices.scores_gradient(self.routing, dgates_NTK, saved.factor).astype(dy.dtype)
        dx, rest = self.layers["router"].backward(
            own_parameters(parameters, "router"), saved.router, dscores
        )
        return (dx_NTD + dx).reshape(dy.shape), [*kept, rest]

    def gradients(self, parameters: Parameters, kept: list[Any]) -> Gradients:
        return {**dict.fromkeys(self.shapes()), **self._served.gradients(parameters, kept)}
