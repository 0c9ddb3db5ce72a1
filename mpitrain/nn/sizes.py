"""Checks of layers' sizes and of the shapes that they are given."""

from operator import index

from mpitrain.arrays import Shape


def expect_sizes(layer: str, *, least: int = 1, **sizes: int) -> None:
    """Raise ``ValueError`` unless a layer's sizes are whole numbers of at least ``least``.

    ``sizes`` are values by the names of the layer's arguments.
    """
    for name, size in sizes.items():
        try:
            is_size = index(size) >= least
        except TypeError:
            is_size = False
        if not is_size:
            raise ValueError(f"{layer}: {name} is a whole number of at least {least}, not {size!r}")


def expect_features(layer: str, features: int, shape: Shape) -> None:
    """Raise ``ValueError`` unless the last axis of a sample has this length."""
    if not shape or shape[-1] != features:
        raise ValueError(
            f"a {layer} of {features} features needs them on the last axis, not {shape}"
        )


def expect_image(layer: str, shape: Shape, channels: int | str = "channels") -> None:
    """Raise ``ValueError`` unless a sample is an image, of this number of channels if given."""
    if len(shape) != 3 or (isinstance(channels, int) and shape[2] != channels):
        raise ValueError(
            f"a {layer} needs images of shape (rows, columns, {channels}), not {shape}"
        )
