"""The noise scale of gradients: the batch from which on a larger one helps little."""

from msgspec import UNSET, UnsetType

from mpitrain.config import ConfigError
from mpitrain.group import share
from mpitrain.metrics.records import Noise

#: Part of the moving averages that a step keeps.
_KEPT = 0.99


class NoiseScale:
    """Signal and noise of gradients by McCandlish et al. 2018, appendix A, and their averages.

    Attributes:
        averages: moving averages of both estimates.
    """

    def __init__(self, parts: int, *, is_split: bool) -> None:
        """``parts``: micro-batches of a batch; ``is_split``: stages share parameters."""
        if parts == 1 or is_split:
            raise ConfigError(
                "run.noise_scale compares the gradients of a batch's micro-batches, each whole; "
                "set parallel.pipe = 1, as stages share tied parameters"
                if is_split
                else "run.noise_scale compares the gradients of a batch's micro-batches, and there "
                "is one; set train.micro_batches = 2, or start more ranks"
            )
        self._parts = parts
        self.averages = [0.0, 0.0]

    def seen(self, samples: int, whole: float, apart: float) -> Noise | UnsetType:
        """Two estimates without bias, by the squared norm of the ``whole`` gradient of a batch, and
        the sum ``apart`` of those of its parts' shares of it.

        With sizes b of the parts of a batch of B samples, true gradient G and trace T of a sample's
        covariance, ``whole`` has the mean G^2 + T/B, ``apart`` G^2 sum((b/B)^2) + T/B.
        """
        cuts = (share(samples, part, self._parts) for part in range(self._parts))
        overlap = sum(((cut.stop - cut.start) / samples) ** 2 for cut in cuts)
        if overlap == 1:  # a last batch of one sample
            return UNSET
        square = (whole - apart) / (1 - overlap)
        variance = samples * (whole - square)
        both = zip(self.averages, (square, variance), strict=True)
        self.averages = signal, noise = [_KEPT * old + (1 - _KEPT) * new for old, new in both]
        return Noise(square, variance, noise / signal if signal > 0 else 0.0)
