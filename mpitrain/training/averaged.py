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
    """Put the weights for tests in place, on all ranks, inside of a ``with`` statement.

    These are the averages of ``optim.average`` if the job has them, and the consensus of workers
    that train by themselves.  The body of the statement must end with a message from every rank, so
    that no rank still reads these weights when the old ones return.  Collective.
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
        # After an error of one rank alone, the others do not join the refresh of shards.
        shared = isinstance(error, SHARED_ERRORS)
        if parts.store.is_replicated or (shared and all_here(parts.comm)):
            parts.refresh()
        raise
    back()
    parts.refresh()


def _replace(parts: Parts) -> Callable[[], None] | None:
    """Put the weights for tests into this rank's pieces; returns a function that undoes it."""
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
