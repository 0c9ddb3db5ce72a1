"""Features of a program crossed with layouts, drawn: as one process trains, also in two runs."""

from random import Random

import pytest

from mpitrain.config import ConfigError
from tests.cases import mostly_slow
from tests.mpi.mpitrain.drawn_features import job, layout
from tests.mpi.mpitrain.fits import RANKS, assert_as_alone, assert_equal, made

pytestmark = pytest.mark.at_most(5)
QUICK, ALL = (1, 2), 60


def in_a_layout(rng, of, folder, **given):
    """A trainer in a drawn layout, and its keys; the job's tables refuse some."""
    for _ in range(60):  # an optimiser of whole parameters goes in one of six
        keys = layout(rng, *of, RANKS)
        try:
            return made(folder, **given, **keys), keys
        except ConfigError as error:
            refused = error
    raise refused


@pytest.mark.parametrize("seed", mostly_slow(range(ALL), QUICK))
def test_a_drawn_program_trains_and_goes_on_as_in_one_process(folder, alone, seed):
    """With the same bits in the same layout, up to rounding in another one."""
    rng = Random(f"{RANKS} {seed}")
    given, *of = job(rng)
    right = alone(**given)
    given["checkpoint"] = {"every": 3}
    trainer, keys = in_a_layout(rng, of, folder, **given)
    with trainer:
        tests = trainer.fit()
    assert_as_alone(tests, trainer.module, right, rtol=1e-8)
    given["dir"] = str(folder / "again")
    with made(folder, **given, **keys, steps=rng.randint(1, 9)) as first:
        first.fit()
    if rng.random() < 0.5:
        with made(folder, **given, **keys) as rest:
            assert rest.fit(resume=True)[-1] == tests[-1]
        assert_equal(rest.module, trainer.module)
    else:
        rest, _ = in_a_layout(rng, of, folder, **given)
        with rest:
            assert_as_alone(
                rest.fit(resume=True)[-1:], rest.module, (right[0][-1:], right[1]), 1e-8
            )
