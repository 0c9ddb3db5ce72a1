"""Deep Gradient Compression: momentum before the choice of the largest, not after."""

from dataclasses import dataclass
from math import inf, sqrt
from typing import ClassVar

import numpy as np

from collectives.codec import Residual
from mpitrain.arrays import Array
from mpitrain.compress.feedback import SentMomentum
from mpitrain.compress.options import Named, expect_decay, expect_least, expect_share, kept_of
from mpitrain.compress.topk import Indices, largest

#: Stages of the warm-up, in which the share falls to that which is kept.
_STAGES = 4


@dataclass(frozen=True)
class DGC(Named):
    """The largest sums of velocities, with momentum of a rank's own (Lin et al. 2018).

        g = g min(1, clip / (sqrt(p) |g|));  u = m u + g;  v = v + u
        the largest |v| are sent, and v and u are 0 where they were

    The optimiser then has no momentum of its own.  Exactly round(keep n) elements are sent, the
    largest; a sample guesses where they begin.  Bytes: 8 a pair.  Biased, and u and v are its
    feedback.  With keep = 1 and masking this is plain SGD, without masking SGD with momentum.

    Attributes:
        keep: share of the elements that is sent; at least one is.
        momentum: m.
        nesterov: u = m (u + g), v = v + u + g.
        masking: u is 0 where v was sent, so that old directions are forgotten.
        clip: bound of the length of the whole model's summed gradient, of which a rank takes
            1/sqrt(p); 0 for none.  Sums begin when all gradients are there.
        warmup: first steps, in whose four quarters more is sent: keep to the power of 1/5, 2/5,
            3/5 and 4/5, as 25%, 6.3%, 1.6% and 0.4% for 0.1%.
    """

    name: ClassVar[str] = "dgc"
    unbiased: ClassVar[bool] = False
    feedback: ClassVar[str] = "on"
    keep: float = 0.001
    momentum: float = 0.9
    nesterov: bool = False
    masking: bool = True
    clip: float = 0.0
    warmup: int = 0

    def __post_init__(self) -> None:
        expect_share("keep", self.keep)
        expect_decay("momentum", self.momentum)
        expect_least("clip", self.clip, 0)
        expect_least("warmup", self.warmup, 0)

    def keep_at(self, step: int) -> float:
        """Share of the elements that is sent in ``step``, counted from 0."""
        if step >= self.warmup:
            return self.keep
        stage = _STAGES * step // self.warmup
        return float(self.keep ** ((stage + 1) / (_STAGES + 1)))

    def select(self, x: Array, step: int) -> Indices:
        return largest(x, kept_of(len(x), self.keep_at(step)))

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
