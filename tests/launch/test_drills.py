"""Real jobs with real faults: each goes on, or fails with the culprit's name and is resumed."""

import os

import numpy as np
import pytest

from tests.drills import KINDS, draw
from tests.drills.drill import Drills
from tests.drills.outside import Disk
from tests.launch.programs import LAUNCHER, ROOT

#: The others need hosts: tests/cluster.
HERE = [kind for kind in KINDS if kind not in ("cut", "slow")]
RANKS = 4
#: Drawn moments at which each fault strikes.
SWEEPS = int(os.environ.get("SWEEPS", "3"))


@pytest.fixture(scope="module")
def drills(tmp_path_factory):
    return Drills(
        [LAUNCHER, "-n", str(RANKS)],
        ROOT / "tests/drills/drill.toml",
        tmp_path_factory.mktemp("drills"),
        [f"data.path={ROOT}/jobs/examples/license.txt"],
        {kind: Disk(kind) for kind in ("full", "readonly")},
        {**os.environ, "PYTHONPATH": str(ROOT)},
    )


@pytest.fixture(scope="module")
def reference(drills):
    return drills.reference()


@pytest.mark.slow  # each starts a job twice
@pytest.mark.parametrize("seed", range(SWEEPS))
@pytest.mark.parametrize("kind", HERE)
def test_a_fault_wherever_it_strikes(drills, reference, kind, seed):
    weights, steps = reference
    fault = draw(kind, seed, RANKS, steps)
    outcome = drills.drill(fault, weights)
    if outcome.verdict == "skipped":
        pytest.skip(outcome.words)
    assert outcome.good, f"{fault} {outcome.verdict}: {outcome.words}"
    assert outcome.verdict == ("went on" if KINDS[kind].survives else "named")
    if kind == "pause" and len(os.sched_getaffinity(0)) >= RANKS:  # else a rank may lack a core
        assert outcome.words.startswith(f"rank {fault.rank} took ")


@pytest.mark.slow
def test_a_drill_tells_one_bit_of_difference(drills, reference):
    weights, steps = reference
    other = {name: values.copy() for name, values in weights.items()}
    next(iter(other.values())).view(np.uint8).flat[-1] ^= 1
    outcome = drills.drill(draw("pause", 200, RANKS, steps), other)
    assert (outcome.verdict, outcome.good) == ("ends with other weights", False)
