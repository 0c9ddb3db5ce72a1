"""Stage 10: models of ``transformers`` as they come, in float64, beside the CPU's losses."""

from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from mpi4py import MPI

from tests.gpu.check import Check


def beside_the_cpu(name, layout):
    """Losses of two epochs with padding, labels of -100 and dropouts."""
    from tests.mpi.mpitrain.test_transformers import losses

    found = []
    for device in ("cpu", "cuda"):
        with TemporaryDirectory() as own:
            folder = Path(MPI.COMM_WORLD.bcast(own))
            found.append(losses(folder, name, layout, device=device))
            MPI.COMM_WORLD.Barrier()  # the first rank's folder is in use
    np.testing.assert_allclose(found[1], found[0], rtol=1e-8)
    worst = np.abs(np.divide(found[1], found[0]) - 1).max()
    return f"{len(found[0])} losses, which differ by {worst:.0e} at most"


CELLS = {
    ("gpt2", "data"): (1, 2),
    ("gpt2", "zero 3"): (2,),
    ("gpt2", "pipe 2"): (2,),
    ("gpt2", "tensor 2"): (2,),
    ("gpt2", "pipe 2 x tensor 2"): (4,),
    ("llama", "tensor 2"): (2,),
    ("bert mlm", "data"): (2,),
    ("vit", "pipe 2"): (2,),
}
CHECKS = [
    Check(10, f"{name}.{layout}", partial(beside_the_cpu, name, layout), ranks, 120.0)
    for (name, layout), ranks in CELLS.items()
]
