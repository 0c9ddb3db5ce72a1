"""Stage 4: with a fault in what orders a GPU's work, the sums of stage 3 must be wrong.

A check that passes whatever is done shows nothing; these show that stage 3 would have noticed.
"""

from functools import partial

from mpi4py import MPI

from tests.gpu.check import Check
from tests.queued_cupy.mutants import ALONE, ON_RANKS, mutated

#: Faults after which each turn is wrong on any GPU, not only by chance, and the road they are of.
FAULTS = {
    "messages start without a gate": "direct",
    "a blocking call passes its gates unasked": "direct",
    "the plan does not follow the caller": "staged",
    "copies to pinned memory go to the null stream": "staged",
    "a rank tells its peers too early": "ipc",
}


def noticed(mutant, road):
    """The job's own modules are imported anew, one of them with the fault in it.

    On a GPU some turns go well by chance.
    """
    with mutated(mutant) as load:
        roads = load("tests.gpu.roads")
        right = roads.slow_sums(road, 3 if hasattr(roads.begin()[0], "machine") else 24)
    wrong = MPI.COMM_WORLD.allreduce(right.count(False))
    assert wrong, "the sums are right with the fault, too"
    return f"wrong without it, as it must be: {wrong} of {MPI.COMM_WORLD.size * len(right)}"


CHECKS = [
    Check(4, f"controls.{mutant.name}", partial(noticed, mutant, FAULTS[mutant.name]), (2,), 120)
    for mutant in (*ALONE, *ON_RANKS)
    if mutant.name in FAULTS
]
