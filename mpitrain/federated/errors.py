"""Errors of a round."""

from mpitrain.ranks.together import SharedError


class RoundError(SharedError):
    """A round has no result: too few clients are left, or their shares do not fit."""
