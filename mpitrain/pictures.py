"""Import of matplotlib, which only pictures need."""

from typing import TYPE_CHECKING, Any

from collectives.errors import install

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def figure(**options: Any) -> "Figure":
    """An empty matplotlib figure; ``options`` are those of ``matplotlib.figure.Figure``.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            f"a picture needs matplotlib ({error}): {install('matplotlib', 'plot')}"
        ) from error
    return Figure(layout="constrained", **options)
