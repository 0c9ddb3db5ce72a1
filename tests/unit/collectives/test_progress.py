"""Plans under way, among threads."""

import sys
import threading
from collections.abc import Iterator

import pytest

from collectives.execution.progress import Moving, Progress


class Stub:
    """A plan that never ends by itself."""

    def __init__(self) -> None:
        self.among: list[Moving] = []

    def Test(self) -> bool:
        return False

    def abandon(self) -> None: ...


def test_a_plan_goes_on_in_the_thread_that_waits_for_it():
    progress, plan, seen = Progress(), Stub(), []
    progress.add(plan)

    def wait() -> None:
        progress.adopt(plan)
        seen.extend(progress.here)

    waiting = threading.Thread(target=wait)
    waiting.start()
    waiting.join()
    assert seen == [plan] and not progress.here
    progress.remove(plan)
    assert not progress.plans and not plan.among


@pytest.fixture
def turns() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("turns")
def test_a_plan_ends_while_another_thread_begins_to_wait_for_it():
    progress, errors = Progress(), []
    plans = [Stub() for _ in range(2000)]

    def adopt() -> None:
        try:
            for plan in plans:
                progress.adopt(plan)
        except ValueError as error:
            errors.append(error)

    for plan in plans:
        progress.add(plan)
    waiting = threading.Thread(target=adopt)
    waiting.start()
    for plan in plans:
        progress.remove(plan)
    waiting.join()
    assert not errors and not progress.plans and not progress.here
