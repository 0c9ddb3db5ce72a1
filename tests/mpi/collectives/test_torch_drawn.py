"""Drawn calls of ``torch.distributed``, beside Gloo's: :mod:`tests.torch_drawn`."""

import pytest

from tests.mpi.collectives.forms import P
from tests.torch_drawn import run_drawn
from tests.torch_drawn.calls import KINDS

pytestmark = [pytest.mark.quick_on(3), pytest.mark.usefixtures("world")]
SWEEP = pytest.param(3, 1000, marks=[pytest.mark.slow, pytest.mark.at_most(4)])


@pytest.mark.parametrize(("seed", "calls"), [(1, 60), (2, 400), SWEEP])
def test_drawn_calls_have_the_results_of_gloo(seed, calls):
    """Ranks differ in how tensors lie, in splits that they leave out, in when they wait."""
    report = run_drawn(seed, calls, gloo=calls < 100)
    assert not report.differences, str(report)
    # One rank has nobody to send to.
    assert calls < 100 or P == 1 or {*report.calls} == {*KINDS}
