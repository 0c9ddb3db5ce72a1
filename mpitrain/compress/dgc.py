"""Deep Gradient Compression: momentum before the choice of the largest, not after."""

from dataclasses import dataclass
from math import inf, sqrt
from typing import ClassVar

import numpy as np

from collectives.codec import Residual
from mpitrain.arrays import Array
from mpitrain.compress.feedback import SentMomentum
from mpitrain.compress.options import expect_decay, expect_least
from mpitrain.compress.topk import TopK


@dataclass(frozen=True)
class DGC(TopK):
    """The largest sums of velocities, with momentum of a rank's own (Lin et al. 2018).

        g = g min(1, clip / (sqrt(p) |g|));  u = m u + g;  v = v + u
        the largest |v| are sent, and v and u are 0 where they were

    The optimiser then has no momentum of its own.  Exactly round(keep n) elements are sent, the
    largest; a sample guesses where they begin.  Bytes: 6 a pair.  Biased, and u and v are its
    feedback.  With keep = 1 and masking this is plain SGD, without masking SGD with momentum.

    Attributes:
        keep, warmup: as of :class:`~mpitrain.compress.topk.TopK`.
        momentum: m.
        nesterov: u = m (u + g), v = v + u + g.
        masking: u is 0 where v was sent, so that old directions are forgotten.
        clip: bound of the length of the whole model's summed gradient, of which a rank takes
            1/sqrt(p); 0 for none.  Sums begin when all gradients are there.
    """

    name: ClassVar[str] = "dgc"
    feedback: ClassVar[str] = "on"
    keep: float = 0.001
    momentum: float = 0.9
    nesterov: bool = False
    masking: bool = True
    clip: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        expect_decay("momentum", self.momentum)
        expect_least("clip", self.clip, 0)

    def share(self, squares: float, ranks: int) -> float:
        """Factor of a rank's gradient of squared length ``squares`` that keeps to ``clip``."""
        length = sqrt(ranks * squares)
        return self.clip / length if self.clip and self.clip < length < inf else 1.0

    def velocity(self, u: Array, g: Array, next_u: Array) -> Array:
        """The addition to v for a gradient ``g``; ``next_u`` becomes the next velocity."""
        if self.nesterov:
            next_u[...] = self.momentum * (u + g)
            found: Array = next_u + g
            return found
        next_u[...] = self.momentum * u + g
        return next_u

    def memory(self, value: Array) -> "MomentumCorrection":
        return MomentumCorrection(self, value)

    def of_sum(self, value: Array) -> SentMomentum:
        """u of a sum that has travelled uncompressed (biases, gains), the same on all ranks: the
        sum of the ranks' velocities is the velocity of the sum."""
        return SentMomentum(value, "u", self.velocity)


class MomentumCorrection(Residual):
    """Velocity u of a vector of shape (n,), and v, the sum of velocities since an element was last
    sent.
    """

    def __init__(self, codec: DGC, value: Array) -> None:
        """``value``: memory of v, zeros at first."""
        super().__init__(value)
        self.u = np.zeros_like(value)
        self._codec, self._next_u = codec, np.zeros_like(value)

    @property
    def arrays(self) -> dict[str, Array]:
        return {"u": self.u, "v": self.value}

    def add_to(self, x: Array) -> None:
        """Replaces the gradient ``x`` by v, of which the largest elements are sent."""
        velocity = self._codec.velocity(self.u, x, self._next_u)
        np.add(self.value, velocity, out=self.pending)
        x[...] = self.pending
        self._is_pending = True

    def keep(self, x: Array, sent: Array, part: slice = slice(None)) -> None:
        """Sets v, and with masking u, to 0 where ``part`` of ``x`` was sent."""
        np.subtract(x, sent, out=self.pending[part])
        if self._codec.masking:
            self._next_u[part][sent != 0] = 0

    def commit(self) -> None:
        if self._is_pending:
            self.u[...] = self._next_u
        super().commit()
