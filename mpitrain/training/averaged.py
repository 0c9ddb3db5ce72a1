"""Weights for tests and exports: moving averages, and the consensus of workers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

from mpitrain.parallel.data_parallel import Replicated
from mpitrain.ranks.together import all_here
from mpitrain.step.update import AVERAGE
from mpitrain.training.parts import SHARED_ERRORS, Parts


@contextmanager
def averaged(parts: Parts) -> Iterator[None]:
    """Show the weights for tests to all ranks inside of a ``with`` statement.

    That is the averages of ``optim.average``, if there are any, and of workers that train by
    themselves what they have together.  What is done meanwhile ends with a message from every rank,
    so that nobody is still reading.  Collective.
    """
    back = _replace(parts)
    if back is None:
        yield
        return
    parts.refresh()
    try:
        yield
    except BaseException as error:
        back()
        # Of one rank alone, the others do not wait to share what is sharded.
        shared = isinstance(error, SHARED_ERRORS)
        if parts.store.is_replicated or (shared and all_here(parts.comm)):
            parts.refresh()
        raise
    back()
    parts.refresh()


def _replace(parts: Parts) -> Callable[[], None] | None:
    """Put the weights for tests into this rank's pieces; the result puts the old ones back."""
    together = parts.strategy.consensus()
    average = parts.config.optim.average
    if together is None:
        if not average:
            return None
        parts.updater.exchange()
        return parts.updater.exchange
    if average:
        together = parts.strategy.mean(parts.updater.slot(AVERAGE))
    parameters = cast(Replicated, parts.store).parameters
    own = parameters.copy()
    parameters[...] = together

    def back() -> None:
        parameters[...] = own

    return back
