"""Errors of a round."""


class RoundError(RuntimeError):
    """A round has no result, on all ranks: too few clients are left, or their shares do not fit."""
