"""What is tested and exported: averages of weights, and what workers have together."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

from mpitrain.parallel.data_parallel import Replicated
from mpitrain.ranks.together import all_here
from mpitrain.step.update import AVERAGE
from mpitrain.training.placed import Placed


@contextmanager
def averaged(trainer: Placed) -> Iterator[None]:
    """All ranks see what is tested until the end, and training goes on as if it had not been.

    That is the averages of ``optim.average``, if there are any, and of workers that train by
    themselves what they have together.  What is done meanwhile ends with a message from every rank,
    so that nobody is still reading.  Collective.
    """
    back = _replace(trainer)
    if back is None:
        yield
        return
    trainer.refresh()
    try:
        yield
    except BaseException as error:
        back()
        # Of one rank alone, the others do not wait to share what is sharded.
        shared = isinstance(error, trainer.shared_errors)
        if trainer.store.is_replicated or (shared and all_here(trainer.comm)):
            trainer.refresh()
        raise
    back()
    trainer.refresh()


def _replace(trainer: Placed) -> Callable[[], None] | None:
    """What is tested takes the place of the own pieces; the result puts these back."""
    together = trainer.strategy.consensus()
    average = trainer.config.optim.average
    if together is None:
        if not average:
            return None
        trainer.updater.exchange()
        return trainer.updater.exchange
    if average:
        together = trainer.strategy.mean(trainer.updater.slot(AVERAGE))
    parameters = cast(Replicated, trainer.store).parameters
    own = parameters.copy()
    parameters[...] = together

    def back() -> None:
        parameters[...] = own

    return back
