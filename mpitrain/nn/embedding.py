"""Token and position embeddings, and scores of tokens."""

from collections.abc import Mapping

from mpitrain.arrays import Array, Pair, Parameters, Shape, array_namespace
from mpitrain.group import TensorGroup
from mpitrain.kernels import kernels_of
from mpitrain.kernels.host import total
from mpitrain.nn.context import RESTING, Context
from mpitrain.nn.layer import Elementwise, Initial, Layer, matmul

_DEVIATION = 0.02


class _TokenTable(Layer):
    """A table with a row of ``width`` numbers for each token; tensor ranks have some rows each."""

    split = {"token": 0}  # noqa: RUF012

    def __init__(self, vocabulary: int, width: int) -> None:
        self.vocabulary = vocabulary
        self.width = width

    def initial(self) -> Mapping[str, Initial]:
        return {"token": Initial((self.vocabulary, self.width), _DEVIATION)}


class TokenEmbedding(_TokenTable):
    """Row ``x`` of a table: integers x_NT to y_NTD.

    A rank of a tensor group gives 0 for rows that other ranks have; y is the sum over the group,
    made by :class:`mpitrain.parallel.tensor_parallel.Leave`.
    """

    def __init__(self, vocabulary: int, width: int, group: TensorGroup) -> None:
        super().__init__(vocabulary, width)
        self.group, self.choices = group, vocabulary

    def output_shape(self, shape: Shape) -> Shape:
        return *shape, self.width

    def forward(self, parameters: Parameters, x: Array) -> Pair:
        first = self.group.share(self.vocabulary).start
        rows = x - first
        own = (rows >= 0) & (rows < len(parameters["token"]))
        xp = array_namespace(x)
        y = parameters["token"][xp.where(own, rows, 0)]
        if self.group.size > 1:
            y *= own[..., None]
        return y, xp.where(own, rows, -1)

    def backward(self, parameters: Parameters, saved: Array, dy: Array) -> tuple[Array, Pair]:
        # There is no derivative by a token's number.
        return array_namespace(dy).zeros(dy.shape[:-1], dy.dtype), (saved, dy)

    def gradients(self, parameters: Parameters, kept: Pair) -> dict[str, Array]:
        rows, dy = kept
        return {"token": kernels_of(dy).scatter_add(rows, dy, len(parameters["token"]))}


class PositionEmbedding(Elementwise):
    """``y_NTD = x_NTD + position_TD``."""

    sees = True

    def __init__(self, context: int, width: int, group: TensorGroup, *, sequence: bool) -> None:
        """``sequence``: each rank of ``group`` has a slice of the positions of x."""
        self.context = context
        self.width = width
        self.group = group
        self.sequence = sequence
        if sequence:
            self.summed = frozenset({"position"})

    def initial(self) -> Mapping[str, Initial]:
        return {"position": Initial((self.context, self.width), _DEVIATION)}

    def forward(
        self, parameters: Parameters, x: Array, context: Context = RESTING
    ) -> tuple[Array, slice | Array]:
        first = self.group.rank * x.shape[1] if self.sequence else 0
        rows: slice | Array = slice(first, first + x.shape[1])
        if context.positions:
            rows = context.positions.own[rows]
        return x + parameters["position"][rows], rows

    def backward(
        self, parameters: Parameters, saved: slice | Array, dy: Array
    ) -> tuple[Array, tuple[slice | Array, Array]]:
        return dy, (saved, dy)

    def gradients(
        self, parameters: Parameters, kept: tuple[slice | Array, Array]
    ) -> dict[str, Array]:
        rows, dy = kept
        gradient = array_namespace(dy).zeros_like(parameters["position"])
        gradient[rows] = total(dy, axis=0)
        return {"position": gradient}


class Unembedding(_TokenTable):
    """Scores of tokens by the table that embeds them: x_NTD to y_NTV (Press & Wolf 2017).

    Each rank of a tensor group gives the scores of its rows of the table.
    """

    def __init__(self, vocabulary: int, width: int, tied: str) -> None:
        """``tied`` is the table's name in the model."""
        super().__init__(vocabulary, width)
        self.tied = {"token": tied}

    def output_shape(self, shape: Shape) -> Shape:
        return *shape[:-1], self.vocabulary

    def forward(self, parameters: Parameters, x: Array) -> Pair:
        return matmul(x, parameters["token"].T), x

    def backward(self, parameters: Parameters, saved: Array, dy: Array) -> tuple[Array, Pair]:
        return matmul(dy, parameters["token"]), (saved, dy)

    def gradients(self, parameters: Parameters, kept: Pair) -> dict[str, Array]:
        x, dy = kept
        rows = dy.reshape(-1, dy.shape[-1])
        return {"token": matmul(rows.T, x.reshape(-1, x.shape[-1]))}
