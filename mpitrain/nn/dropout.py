"""Dropout (Srivastava et al. 2014), whose masks do not depend on the number of ranks."""

from typing import Any

from mpitrain.arrays import Array, Parameters, Shape, array_namespace
from mpitrain.nn.context import RESTING, Context
from mpitrain.nn.layer import Elementwise


class Dropout(Elementwise):
    """In training, each number becomes 0 with probability p, else ``1 / (1 - p)`` times itself."""

    sees = True
    #: Number of the first row of the image that is here, where ranks share its rows.
    first_row = 0

    def __init__(self, p: float = 0.5) -> None:
        """``ValueError``: p is no probability."""
        if not 0 <= p <= 1:
            raise ValueError(f"p = {p}: a probability from 0 to 1")
        self.p = p

    def forward(
        self, parameters: Parameters, x: Array, context: Context = RESTING
    ) -> tuple[Array, Any]:
        first = (self.first_row, *(0,) * (x.ndim - 2)) if self.first_row else None
        factors = dropout_mask(context, self.p, x.shape[1:], first)
        if factors is None:
            return x, None
        factors = array_namespace(x).asarray(factors, dtype=x.dtype)
        return x * factors, factors

    def backward(self, parameters: Parameters, saved: Any, dy: Array) -> tuple[Array, Any]:
        return (dy if saved is None else dy * saved), None


def dropout_mask(
    context: Context, p: float, shape: Shape, first: tuple[int | Array, ...] | None = None
) -> Array | None:
    """Factors 0 and ``1 / (1 - p)`` of the shape (samples, *shape); None if nothing drops out.

    ``first``: as :meth:`~mpitrain.nn.context.Context.uniform` takes it.
    """
    if not context.training or not p:
        return None
    kept = context.uniform(shape, first=first) >= int(p * 2.0**64)
    factors: Array = kept / (1 - p) if p < 1 else kept.astype(float)
    return factors
