"""Any ``torch.nn.Module``: torch computes, this package communicates.

A module can be layers of the trainer, in any layout of ranks:

    Trainer(comm, job, layers=layers(torch.nn.Sequential(...)))

or a replica in a user's own loop, as with torch's DistributedDataParallel:

    with DataParallel(Communicator(MPI.COMM_WORLD), module) as replica:
        optimizer.zero_grad()
        criterion(replica(inputs), labels).backward()
        optimizer.step()

:class:`DistributedDataParallel` has the interface of torch's class.
"""

from collectives.errors import install

try:
    import torch  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"torch layers need PyTorch ({error}): {install('torch', 'torch')}"
    ) from error

from mpitrain.adapters.torch.compression import Compression, compression_hook
from mpitrain.adapters.torch.drop_in import DistributedDataParallel
from mpitrain.adapters.torch.layer import TorchLayer
from mpitrain.adapters.torch.modules import layers, load_into
from mpitrain.adapters.torch.replica import DataParallel

__all__ = [
    "Compression",
    "DataParallel",
    "DistributedDataParallel",
    "TorchLayer",
    "compression_hook",
    "layers",
    "load_into",
]
