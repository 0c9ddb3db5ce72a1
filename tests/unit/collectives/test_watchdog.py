"""Messages of ranks on a hang, and a watchdog that a false alarm leaves as it was."""

import gc
import os
import signal
import socket
import subprocess
import threading
from queue import Queue
from time import monotonic, sleep
from types import SimpleNamespace

import numpy as np
import pytest
from mpi4py import MPI

from collectives import Communicator
from collectives.failure.history import History
from collectives.failure.peers import MOST_BYTES, Peers
from collectives.failure.report import deadlock, missing, note, report
from collectives.failure.watchdog import Watchdog
from tests.processes import until


@pytest.fixture
def watchdog():
    made = Watchdog(MPI.Intracomm(MPI.COMM_SELF), 0.2)
    yield made
    made.close()


def question(peers, text, seconds=60):
    """Answer of ``peers`` to a datagram in time, or nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asking.settimeout(seconds)
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
    assert not question(watchdog._peers, "taken", 0.3)
    assert came.wait(60) and watchdog._thread.is_alive()
    assert question(watchdog._peers, watchdog._peers.token)


def test_a_false_alarm(watchdog):
    """The call goes on while the others are asked."""
    before, asked = threading.active_count(), threading.Event()

    def slow(seconds):
        watchdog.calls.leave(call)
        asked.set()
        return {}

    watchdog._peers.ask = slow
    call = watchdog.calls.enter("allreduce")
    assert asked.wait(60)
    until(lambda: threading.active_count() <= before)
    assert threading.active_count() == before and watchdog._thread.is_alive()
    assert question(watchdog._peers, watchdog._peers.token)


def test_a_rank_waits_when_half_of_the_time_is_over(watchdog):
    watchdog._look, watchdog.timeout = (lambda *given: None), 100
    call = watchdog.calls.enter("allreduce")
    assert not watchdog._status()["waits"]
    call.begun -= 51
    assert watchdog._status()["waits"]
    watchdog.calls.leave(call)


def test_it_ends_the_job_where_no_thread_can_be_started(watchdog, monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    ended = Queue()
    watchdog._end = lambda text, status: ended.put(text)
    call = watchdog.calls.enter("allreduce")
    assert "has not ended after 0.2 s" in ended.get(timeout=60)
    watchdog.calls.leave(call)


@pytest.mark.parametrize("stack", ["ä" * 20_000, "\N{MUSICAL SYMBOL G CLEF}\n" * 9000])
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
    answers = asking.ask(20.0)
    over.set()
    serving.join()
    for peers in (asking, asked):
        peers.close()
    told = answers[1]["stack"]
    assert stack.endswith(told) and len(told.encode()) > MOST_BYTES // 3


def test_numbers_do_not_tell_who_waits_from_who_polls():
    """A rank may ``Wait`` where another calls ``Test``, and call a plan that another starts."""

    def poll(plan):
        while not plan.Test():
            pass

    def start(plan):
        plan.Start()
        poll(plan)

    told = []
    for complete, run in ((lambda plan: plan.Wait(), lambda plan: plan()), (poll, start)):
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


def in_a_thread(act):
    thread = threading.Thread(target=act)
    thread.start()
    thread.join()


@pytest.mark.parametrize("close", [Watchdog.close, lambda it: in_a_thread(it.close)])
def test_the_next_watchdog_hears_of_signals_when_the_first_is_closed(capfd, tmp_path, close):
    heard = []
    before = signal.signal(signal.SIGUSR2, lambda *_: heard.append(True))
    made = [Watchdog(MPI.Intracomm(MPI.COMM_SELF), 100) for _ in range(3)]

    def hears(last):
        last.calls.leave(last.calls.enter("of the last"))
        os.kill(os.getpid(), signal.SIGUSR2)
        said = []
        until(lambda: said.append(capfd.readouterr().err) or "of the last at " in "".join(said))
        assert "of the last at " in "".join(said)

    try:
        for closed in made[:2]:
            close(closed)
            hears(made[2])
        close(made[2])
        made[2]._thread.join()
        files = [(tmp_path / str(number)).open("wb", buffering=0) for number in range(40)]
        os.kill(os.getpid(), signal.SIGUSR2)
        sleep(0.3)
        assert len(heard) == 3 and not capfd.readouterr().err
        assert not any(file.tell() for file in files)
        made.append(Watchdog(MPI.Intracomm(MPI.COMM_SELF), 100))
        hears(made[-1])
    finally:
        made[-1].close()
        signal.signal(signal.SIGUSR2, before)


def test_what_is_complete():
    calls = History()
    outer = calls.enter("allreduce")
    calls.leave(calls.enter("a message", numbered=False))
    assert calls.current is outer and (calls.completed, outer.number) == (0, 1)
    calls.leave(calls.enter("barrier"))
    calls.leave(outer)
    assert calls.completed == 2


def test_calls_of_two_threads_end_in_any_order():
    """One that has ended is never the current one, or it would be taken for one that hangs."""
    for order in ((1, 2, 0), (0, 1)):
        calls = History()
        entered = [calls.enter("a") for _ in order]
        under_way = [*entered]
        for at in order:
            calls.leave(entered[at])
            under_way.remove(entered[at])
            assert calls.current is (under_way[-1] if under_way else None)


def answer(rank, number, made, what="allreduce", elsewhere=(), **more):
    """The status of a rank in call ``number``, or in none."""
    is_in = number is not None
    return {
        "rank": rank, "completed": 0, "call": f"#{number} {what}" if is_in else None,
        "what": what if is_in else None, "number": number, "meets": is_in, "made": made,
        "made_on": {}, "elsewhere": elsewhere, "threads": 1, "polls": False,
        "where": f"program.py:{rank}", "stack": "its stack", **more,
    }  # fmt: skip


@pytest.fixture
def pair():
    """As rank 0 of two sees them."""
    found = Peers(MPI.COMM_SELF)
    found.size, found.job, found.hosts = 2, [0, 1], found.hosts * 2
    found._numbers = [os.getpid()] * 2
    yield found
    found.close()


def entered(number):
    calls = History()
    calls.made = number - 1
    return calls.enter("allreduce")


def test_two_ranks_that_wait_for_each_other_on_two_communicators(pair):
    pair.token = "one"
    there = [("other", 3, "#3 barrier")]
    first = answer(0, 5, 5, made_on={"other": 2})
    assert deadlock(pair, {0: first, 1: answer(1, None, 4, elsewhere=there)}).count("waits in") == 2
    # The call that the other waits in has been begun here, and moves along; or it has begun ours.
    begun = answer(0, 5, 5, made_on={"other": 3})
    assert not deadlock(pair, {0: begun, 1: answer(1, None, 4, elsewhere=there)})
    assert not deadlock(pair, {0: first, 1: answer(1, None, 5, elsewhere=there)})
    # Another thread of a rank may come to it yet.
    threads = answer(1, None, 4, elsewhere=there, threads=2)
    assert not deadlock(pair, {0: first, 1: threads})
    # A communicator that this rank is not in, or does not watch.
    assert not deadlock(pair, {0: answer(0, 5, 5), 1: answer(1, None, 4, elsewhere=there)})


def test_two_ranks_in_different_collectives_of_one_number(pair):
    first = answer(0, 5, 5, what="allgather of layers", call="#5 allgather of layers at {x}.py:1")
    second = answer(1, 5, 5, what="allreduce of layers", call="#5 allreduce of layers")
    why = "rank 0 waits in #5 allgather of layers at {x}.py:1 and rank 1 in #5 allr"
    assert deadlock(pair, {0: first, 1: second}).startswith(why)
    assert not deadlock(pair, {0: first, 1: {**second, "number": 4}})
    assert not deadlock(pair, {0: first, 1: {**second, "meets": False}})
    assert not deadlock(pair, {0: first, 1: {**first, "what": "allgatherv 400 bytes"}})


def test_a_rank_that_has_ended_is_missing_in_the_calls_that_it_has_not_made(pair):
    pair.ended[1] = (4, monotonic())
    answers = {0: answer(0, 5, 5)}
    assert missing(pair, 5, answers) == [1] and missing(pair, 4, answers) == []
    told = report(pair, entered(5), answers, "cannot end without rank 1")
    assert "has ended: its program is over" in told and "missing: rank 1\n" in told


@pytest.mark.parametrize(("has_ended", "waited"), [(True, 31.0), (True, 20.0), (False, 31.0)])
def test_a_message_of_a_rank_that_has_ended_never_comes(pair, has_ended, waited):
    told, call = [], History().enter("recv", numbered=False)
    if has_ended:
        pair.ended[1] = (4, monotonic() - waited)
    seen = SimpleNamespace(
        timeout=float("inf"), _peers=pair, _looked_at=monotonic(),
        _asked=lambda call: {0: answer(0, 0, 0)}, _end=lambda *said: told.append(said),
    )  # fmt: skip
    Watchdog._look(seen, call, waited)
    assert bool(told) == (has_ended and waited > 30)
    if told:
        assert "cannot end without rank 1" in told[0][0] and told[0][1] == 1


def test_equal_calls_are_slow_and_others_differ(pair):
    call = entered(5)
    slow = report(pair, call, {0: answer(0, 5, 5), 1: answer(1, 5, 5)}, "lasts")
    assert "missing: rank none: all are in the same call, which is slow" in slow
    other = report(pair, call, {0: answer(0, 5, 5), 1: answer(1, 5, 5, "barrier")}, "lasts")
    assert "not with the same words (check=True compares them)" in other


def test_who_is_waited_for_and_where_it_is(pair):
    call = entered(5)
    assert not note(pair, call, {0: answer(0, 5, 5), 1: answer(1, 5, 5)}, 30)
    told = note(pair, call, {0: answer(0, 5, 5), 1: answer(1, None, 4)}, 30)
    assert "rank 0 has waited for 30 s at program.py:0" in told
    assert "for rank 1, which is at program.py:1" in told
    assert "does not answer and is alive" in note(pair, call, {0: answer(0, 5, 5)}, 30)


def test_the_state_of_a_process_that_does_not_answer(pair):
    child = subprocess.Popen(["sleep", "60"])
    pair._numbers[1] = child.pid
    assert "is alive" in pair.state(1)
    child.send_signal(signal.SIGSTOP)
    until(lambda: "is stopped" in pair.state(1))
    assert "does not answer: it is stopped" in pair.state(1)
    child.kill()
    child.wait()
    assert "is gone: it has died" in pair.state(1)


def test_a_farewell_is_heard(watchdog):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as saying:
        port = watchdog._peers.socket.getsockname()[1]
        for said in ("another has-ended 3 7", f"{watchdog._peers.token} has-ended 3 7", "", "\0"):
            saying.sendto(said.encode(), ("127.0.0.1", port))
    until(lambda: watchdog._peers.ended)
    assert watchdog._peers.ended[3][0] == 7 and watchdog._thread.is_alive()


def test_a_communicator_that_is_dropped_takes_its_watchdog_along():
    before = threading.active_count()
    comm = Communicator(MPI.Intracomm(MPI.COMM_SELF))
    comm._engine.comm = SimpleNamespace(size=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("collectives.calls.engine.MPI.Intracomm", lambda _: MPI.COMM_SELF)
        comm.watch()
    assert threading.active_count() == before + 1
    del comm
    gc.collect()
    until(lambda: threading.active_count() <= before)
    assert threading.active_count() == before
