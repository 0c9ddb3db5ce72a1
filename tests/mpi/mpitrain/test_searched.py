"""Layouts that the search proposes, trained beside one process."""

import random
import tomllib
from functools import partial

import pytest

from mpitrain.commands.search import _tables, refusal
from mpitrain.search.job import load_job
from mpitrain.search.machine import Machine
from tests.mpi.mpitrain.layouts import RANKS, alone, changed, close, curve, job

pytestmark = [pytest.mark.mpi, pytest.mark.at_most(4)]
#: Models, and axes of which the layouts have some.
PROPOSED = {
    "gpt": ["", "tensor", "context", "zero"],
    "convnet": ["rows", "pipe"],
    "resnet": ["rows"],
    "mlp": ["tensor"],
    "recommender": ["pipe"],
}


def other(axis, seed, refuses, layout):
    """Why the search leaves a layout out: another axis was drawn, or most layouts by chance."""
    used = {"": True, "rows": layout.rows, "zero": layout.zero > 0}
    is_used = used[axis] if axis in used else getattr(layout, axis) > 1
    by_chance = random.Random(f"{seed}{layout}").random() < 0.7
    return refuses(layout) or "not drawn" * (by_chance or not is_used)


@pytest.mark.parametrize(("model", "axis"), [(m, a) for m, own in PROPOSED.items() for a in own])
def test_the_tables_of_a_proposal_train_as_one_process(comm, model, axis):
    config = job(model)
    search = load_job(config, "a test").search(Machine(RANKS, RANKS, 1e9), is_counted=True)
    found = search.fastest(1, partial(other, axis, model, refusal(config)))
    assert found or RANKS in (1, 3)  # three divide few
    losses, _ = alone(config, 5)
    for ran in found:
        proposed = changed(config, **tomllib.loads(_tables(config, ran)))
        together, _ = curve(comm, proposed, 5)
        close({"losses": together}, {"losses": losses}, rtol=1e-10)
