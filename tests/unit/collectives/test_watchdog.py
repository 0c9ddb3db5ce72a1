"""What ranks tell one another of a hang, and that a false alarm leaves the watchdog as it was."""

import json
import os
import signal
import socket
import threading
from time import monotonic, sleep

import numpy as np
import pytest

pytest.importorskip("mpi4py")
from mpi4py import MPI

from collectives import Communicator
from collectives.watchdog.history import History
from collectives.watchdog.monitor import Watchdog
from collectives.watchdog.peers import MOST_BYTES, Peers


@pytest.fixture
def watchdog():
    made = Watchdog(MPI.Intracomm(MPI.COMM_SELF), 0.2)
    yield made
    made.close()


def question(peers, text):
    """What ``peers`` answers to a datagram within a second, or nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asking.settimeout(1)
        asking.sendto(text.encode(), ("127.0.0.1", peers.socket.getsockname()[1]))
        try:
            return asking.recv(MOST_BYTES + 1)
        except TimeoutError:
            return b""


def test_a_question_that_another_thread_has_taken(watchdog):
    real, came = watchdog._peers.answer, threading.Event()

    def racing(status):
        watchdog._peers.answer = real
        watchdog._peers.socket.recvfrom(100)
        real(status)
        came.set()

    watchdog._peers.answer = racing
    assert not question(watchdog._peers, "taken")
    assert came.wait(1) and watchdog._thread.is_alive()
    assert question(watchdog._peers, watchdog._peers.token)


def test_a_false_alarm(watchdog):
    """The call goes on while the others are asked."""
    before, asked = threading.active_count(), threading.Event()

    def slow(seconds):
        watchdog.leave(call)
        asked.set()
        return {}

    watchdog._peers.ask = slow
    call = watchdog.calls.enter("allreduce")
    assert asked.wait(3)
    end = monotonic() + 2
    while threading.active_count() > before and monotonic() < end:
        sleep(0.02)
    assert threading.active_count() == before and watchdog._thread.is_alive()
    assert question(watchdog._peers, watchdog._peers.token)


@pytest.mark.parametrize(
    "stack", ["x" * 20_000, "ä" * 20_000, "\N{MUSICAL SYMBOL G CLEF}\n" * 9000]
)
def test_a_stack_of_any_letters_arrives(stack):
    asking, asked = Peers(MPI.COMM_SELF), Peers(MPI.COMM_SELF)
    asking.size, asking.addresses = 2, [["127.0.0.1"]] * 2
    asking._ports, asking.token = [1, asked._ports[0]], asked.token
    over = threading.Event()

    def serve():
        while not over.wait(0.01):
            asked.answer({"rank": 1, "stack": stack})

    serving = threading.Thread(target=serve, daemon=True)
    serving.start()
    answers = asking.ask(2.0)
    over.set()
    serving.join(1)
    for peers in (asking, asked):
        peers.close()
    told = answers[1]["stack"]
    assert stack.endswith(told) and len(told.encode()) > MOST_BYTES // 3


@pytest.mark.parametrize("letter", ["x", "ä", "\N{MUSICAL SYMBOL G CLEF}"])
def test_a_call_of_any_name_is_told(letter):
    watchdog = Watchdog(MPI.Intracomm(MPI.COMM_SELF), 100)
    with watchdog.waiting(letter * 100_000, numbered=True):
        told = json.loads(question(watchdog._peers, watchdog._peers.token))
    watchdog.close()
    assert told["call"].startswith(f"#1 {letter * 100}") and told["number"] == 1


def wait(plan):
    plan.Wait()


def poll(plan):
    while not plan.Test():
        pass


def test_numbers_do_not_tell_who_waits_from_who_polls():
    """A rank may ``Wait`` where another calls ``Test``, and call a plan that another starts."""

    def start(plan):
        plan.Start()
        poll(plan)

    told = []
    for complete, run in ((wait, lambda plan: plan()), (poll, start)):
        comm = Communicator(MPI.Intracomm(MPI.COMM_SELF), timeout=100)
        calls = comm._engine.watchdog.calls
        complete(comm.Iallreduce(MPI.IN_PLACE, np.zeros(3), algorithm="ring"))
        plan = comm.Allreduce_init(MPI.IN_PLACE, np.zeros(3), algorithm="native")
        run(plan)
        run(plan)
        plan.Free()
        comm.Barrier()
        told.append((calls.made, calls.completed))
        comm.close()
    assert told == [(3, 3)] * 2


def test_a_wait_has_the_number_of_what_it_waits_for():
    with Communicator(MPI.Intracomm(MPI.COMM_SELF), timeout=100) as comm:
        calls = comm._engine.watchdog.calls
        first = comm.Iallreduce(MPI.IN_PLACE, np.zeros(3), algorithm="native")
        assert (calls.made, calls.completed) == (1, 0)
        second = comm.Ibcast(np.zeros(2))
        first.synchronize()
        second.Wait()
        assert (calls.made, calls.completed) == (2, 2)
        lines = comm.report_calls().splitlines()[1:]
    assert [line.split(" at ")[0].strip() for line in lines] == [
        "#1 allreduce native 24 bytes",
        "#2 broadcast auto 16 bytes",
        "#1 Wait for allreduce native 24 bytes",
        "#2 Wait for broadcast native 16 bytes",
    ]


def test_the_next_watchdog_hears_of_signals_when_the_first_is_closed(capfd):
    heard = []
    before = signal.signal(signal.SIGUSR2, lambda *_: heard.append(True))
    first, second, third = (Watchdog(MPI.Intracomm(MPI.COMM_SELF), 100) for _ in range(3))
    try:
        third.leave(third.calls.enter("of the third"))
        for number, closed in enumerate((first, second), 1):
            closed.close()
            os.kill(os.getpid(), signal.SIGUSR2)
            said, end = "", monotonic() + 3
            while "of the third" not in said and monotonic() < end:
                said += capfd.readouterr().err
                sleep(0.02)
            assert "#1 of the third at " in said
            assert len(heard) == number
        third.close()
        os.kill(os.getpid(), signal.SIGUSR2)
        sleep(0.3)
        assert len(heard) == 3 and not capfd.readouterr().err
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_what_is_complete():
    calls = History()
    outer = calls.enter("allreduce")
    calls.leave(calls.enter("a message", numbered=False))
    assert calls.current is outer and (calls.completed, outer.number) == (0, 1)
    inner = calls.enter("barrier")
    calls.leave(inner)
    calls.leave(outer)
    assert calls.completed == 2
    alone = calls.enter("a message", numbered=False)
    assert str(alone).startswith("a message at ") and str(inner).startswith("#2 barrier at ")


def test_calls_of_two_threads_end_in_any_order():
    """One that has ended is never the current one, or it would be taken for one that hangs."""
    calls = History()
    first, second, third = (calls.enter(name) for name in ("a", "b", "c"))
    calls.leave(second)
    assert calls.current is third
    calls.leave(third)
    assert calls.current is first
    calls.leave(first)
    assert calls.current is None
    first, second = calls.enter("a"), calls.enter("b")
    calls.leave(first)
    assert calls.current is second
    calls.leave(second)
    assert calls.current is None
