"""matplotlib, which only pictures need."""

from typing import Any

from collectives.errors import CollectiveError


def pyplot() -> Any:
    """matplotlib's ``pyplot``, which draws into files.

    Raises:
        CollectiveError: matplotlib is not installed.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise CollectiveError(
            f"a picture needs matplotlib ({error}): pip install 'mpitrain[plot]'"
        ) from error
    return pyplot
