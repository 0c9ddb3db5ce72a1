"""Drawn calls of ``torch.distributed`` over our backend, each beside Gloo's and a sum by hand.

    mpiexec -n 3 python -m tests.torch_drawn --calls 1000 --seed 1

All ranks draw the same calls (:mod:`.calls`, :mod:`.messages`, :mod:`.gradients`).  Each rank draws
for itself what torch lets differ between ranks: how its tensors lie and overlap (:mod:`.draw`),
whether it writes splits out, whether it waits at once.  :mod:`.run` makes the calls and compares.
"""

from tests.torch_drawn.run import Report, run_drawn

__all__ = ["Report", "run_drawn"]
