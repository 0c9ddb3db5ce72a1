"""The noise scale of gradients: the batch from which on a larger one helps little."""

import numpy as np
from msgspec import UNSET, UnsetType

from mpitrain.config import ConfigError
from mpitrain.group import share
from mpitrain.metrics.records import Noise

#: Part of the moving averages that a step keeps.
_KEPT = 0.99


class NoiseScale:
    """Signal and noise of gradients by McCandlish et al. 2018, appendix A, and their averages."""

    def __init__(self, parts: int) -> None:
        """``parts``: micro-batches of a batch; ConfigError: there is one."""
        if parts == 1:
            raise ConfigError(
                "run.noise_scale compares the gradients of a batch's parts, and the batch has one; "
                "set train.micro_batches = 2, or start more ranks"
            )
        self._parts = parts
        self._averages = np.zeros(2)

    def seen(self, samples: int, whole: float, apart: float) -> Noise | UnsetType:
        """Two estimates without bias, of a batch of so many samples.

        With sizes b of the parts of a batch of B samples, true gradient G and trace T of a sample's
        covariance, ``whole`` has the mean G^2 + T/B, ``apart`` G^2 sum((b/B)^2) + T/B.

        Args:
            samples: samples of the batch.
            whole: squared norm of its gradient.
            apart: sum over its parts of the squared norm of each one's share of this gradient.
        """
        cuts = (share(samples, part, self._parts) for part in range(self._parts))
        overlap = sum(((cut.stop - cut.start) / samples) ** 2 for cut in cuts)
        if overlap == 1:  # a last batch of one sample
            return UNSET
        square = (whole - apart) / (1 - overlap)
        variance = samples * (whole - square)
        self._averages = _KEPT * self._averages + (1 - _KEPT) * np.array([square, variance])
        signal, noise = self._averages.tolist()
        return Noise(square, variance, noise / signal if signal > 0 else 0.0)
