"""The commands of ``python -m collectives``."""

from collectives.commands.arguments import (
    above_zero,
    add_ranks,
    add_virtual,
    also,
    count,
    in_words,
    network,
    not_negative,
    positive,
    rank_count,
)
from collectives.commands.program import (
    Commands,
    add_commands,
    add_verbose,
    add_version,
    parsed,
    show_log,
    while_read,
)

__all__ = [
    "Commands", "above_zero", "add_commands", "add_ranks", "add_verbose", "add_version",
    "add_virtual", "also", "count", "in_words", "network", "not_negative", "parsed", "positive",
    "rank_count", "show_log", "while_read",
]  # fmt: skip
