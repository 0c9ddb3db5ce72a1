"""A job whose tables fit together."""

from mpitrain.config.conflicts import refusals
from mpitrain.config.tables import Tables
from mpitrain.config.validation import faults


class Config(Tables, frozen=True, forbid_unknown_fields=True):
    """A training job; each attribute is the TOML table of its name."""

    def __post_init__(self) -> None:
        """Raises ``ValueError``: values that cannot be, or methods that do not go together."""
        for place, why in (*refusals(self), *faults(self)):
            raise ValueError(f"{place}: {why}")
