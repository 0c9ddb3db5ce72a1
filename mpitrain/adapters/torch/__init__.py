"""Any ``torch.nn.Module``: torch computes, this package communicates.

A module can be layers of the trainer, in any layout of ranks:

    Trainer(comm, job, layers=layers(torch.nn.Sequential(...)))

``modules`` has such layers, ``functions`` the program's loss, metrics, optimizer and schedule.
``checks`` watches both, and ``shadow`` compares their first steps with plain torch.

A loop of one's own has torch's DistributedDataParallel over the backend of
:mod:`collectives.torch`; :class:`Compression` brings the trainer's codecs to it.
"""

from collectives.errors import install

try:
    import torch  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"torch layers need PyTorch ({error}): {install('torch', 'torch')}"
    ) from error

from mpitrain.adapters.torch.compression import Compression, compression_hook
from mpitrain.adapters.torch.modules.layer import TorchLayer
from mpitrain.adapters.torch.modules.whole import layers, load_into

__all__ = [
    "Compression",
    "TorchLayer",
    "compression_hook",
    "layers",
    "load_into",
]
