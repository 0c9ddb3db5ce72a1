"""Sizes of layers, looked at where a layer is made."""

from operator import index


def expect_sizes(layer: str, *, least: int = 1, **sizes: int) -> None:
    """They are whole numbers of at least ``least``.

    Args:
        layer: in whose name errors speak.
        least: 1 for lengths and strides, 0 for borders.
        sizes: by the names of the layer's arguments.

    Raises:
        ValueError: one of them is not.
    """
    for name, size in sizes.items():
        try:
            is_size = index(size) >= least
        except TypeError:
            is_size = False
        if not is_size:
            raise ValueError(f"{layer}: {name} is a whole number of at least {least}, not {size!r}")
