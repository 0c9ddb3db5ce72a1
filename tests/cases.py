"""Cases of parametrised tests: all algorithms, and cases of which only some are quick."""

from functools import partial

import pytest

from collectives.algorithms import ALGORITHMS

every_algorithm = pytest.mark.parametrize(
    "algorithm", ALGORITHMS, ids=lambda a: f"{a.collective}-{a.name}"
)
#: A case that quick runs leave out.
slow_case = partial(pytest.param, marks=pytest.mark.slow)


def mostly_slow(cases, quick):
    """The cases, slow but for those that ``quick`` has, or of which it is true if it is a function.

    A tuple is a case of several values.
    """
    is_quick = quick if callable(quick) else [*quick].__contains__
    return [
        (pytest.param if is_quick(case) else slow_case)(*(case if type(case) is tuple else [case]))
        for case in cases
    ]


def each_check(checks, is_quick):
    """Checks of ``tests.gpu``, slow but for those of whose name ``is_quick`` is true."""
    return [(pytest.param if is_quick(one.name) else slow_case)(one, id=one.name) for one in checks]
