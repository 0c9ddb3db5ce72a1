"""When a job has to stop by itself."""

import pytest

from mpitrain.stop import stop_flag


@pytest.mark.parametrize(
    ("end", "stops"), [("1", True), ("9" * 12, False), ("", False), ("²", False), ("soon", False)]
)
def test_the_end_of_the_allocation(end, stops):
    with stop_flag(120.0, {"SLURM_JOB_END_TIME": end}) as flag:
        assert flag.raised() is stops
