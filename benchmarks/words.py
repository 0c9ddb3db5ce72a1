"""Sizes in words."""


def bytes_in_words(size: int) -> str:
    """As in ``256 KiB``."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size >= 1 << power and size % (1 << power) == 0:
            return f"{size >> power} {unit}"
    return f"{size} B"
