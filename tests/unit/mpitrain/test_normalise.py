"""Arguments of a program become a job and objects, before anything is made of them."""

import numpy as np
import pytest
from mpi4py import MPI

from mpitrain import nn
from mpitrain.config import Config, ConfigError, Own
from mpitrain.normalise import normalise
from mpitrain.user_objects import Given

LAYERS = {"linear": nn.Linear(3, 1)}
SAMPLES = [(np.ones(3, "f4"), np.ones(1, "f4"))] * 4


@pytest.mark.parametrize(
    ("config", "given", "settings", "told"),
    [
        (None, Given(LAYERS), {"layers": LAYERS}, "layers: this is model.layers, the number of"),
        (Config(own=Own(loss="a.py:b")), Given(LAYERS), {}, "own.loss = 'a.py:b': a job file"),
        (None, Given(lambda: None, SAMPLES), {"parallel": {"context": 2}},
         "layers that work position by position, and a model of the program has any layers"),
        (None, Given(optimizer=lambda p: None), {"momentum": 0.5}, "optim: momentum would have no"),
        (None, Given(cuts=("part",)), {}, "cuts: layers are cut between one another"),
        *((None, Given(LAYERS, SAMPLES, metrics=metrics), {}, told) for metrics, told in (
            ({"mae": 3}, "functions by their names.*'mae': 3"),
            ({3: abs}, "functions by their names"),
            ("mae", "or a list of names, as .'mae'., got 'mae'"),
            (5, "or a list of names.* got 5"),
        )),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(config, given, settings, told):
    with pytest.raises(ConfigError, match=told):
        normalise(MPI.COMM_SELF, config, given, settings)
