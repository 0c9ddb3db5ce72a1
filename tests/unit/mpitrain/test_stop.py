"""Requests to stop."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from mpi4py import MPI

import mpitrain
from mpitrain.config import ConfigError
from mpitrain.ranks import stop
from mpitrain.ranks.stop import stop_flag


@pytest.mark.parametrize(
    ("left_s", "lasts_s", "near"),
    [(1000, 0, False), (50, 0, True), (-5, 0, True), (50, 80, False), (30, 80, True)],
)
def test_the_end_of_the_allotted_time(left_s, lasts_s, near):
    end = int(time.time() + left_s)
    environment = {"SLURM_JOB_END_TIME": str(end)}
    if lasts_s:
        environment["SLURM_JOB_START_TIME"] = str(end - lasts_s)
    with stop_flag(100.0, environment=environment) as flag:
        assert flag.raised() == near
        assert ("time limit" in flag.reason) == near


@pytest.mark.parametrize("end", ["²", "soon", "-1", "1e9", "nan", " "])
def test_an_end_that_is_no_time_is_refused(end):
    with (
        pytest.raises(ConfigError, match=r"SLURM_JOB_END_TIME = .* is no number of seconds"),
        stop_flag(100.0, environment={"SLURM_JOB_END_TIME": end}),
    ):
        pass


@pytest.mark.parametrize("name", ["SIGUSR1", "SIGTERM", "SIGINT"])
def test_signals_are_heard_and_given_back(name, capfd):
    number = signal.Signals[name]
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with stop_flag(100.0, environment={}) as flag:
            assert not flag.raised()
            os.kill(os.getpid(), number)
            assert flag.raised() and flag.reason == f"signal {name}"
            if name == "SIGINT":
                with pytest.raises(KeyboardInterrupt):
                    os.kill(os.getpid(), number)
        assert signal.getsignal(signal.SIGINT) == signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, former)
    assert capfd.readouterr().err.count(f"mpitrain: {name}: the ranks save this step and stop") == 1


def test_a_signal_is_heard_where_nobody_reads_what_is_told(monkeypatch):
    def tell(text):
        raise BrokenPipeError

    monkeypatch.setattr(stop, "_tell", tell)
    with stop_flag(100.0, environment={}) as flag:
        os.kill(os.getpid(), signal.SIGTERM)
        assert flag.raised()


def test_a_thread_beside_the_main_one_leaves_signals_alone():
    def near():
        with stop_flag(100.0, environment={"SLURM_JOB_END_TIME": "1"}) as flag:
            return flag.raised(), signal.getsignal(signal.SIGUSR1)

    with ThreadPoolExecutor() as threads:
        assert threads.submit(near).result() == (True, signal.getsignal(signal.SIGUSR1))


def test_an_interrupted_run_says_how_to_go_on(tmp_path):
    def interrupt(record):
        raise KeyboardInterrupt

    given = {"model": {"kind": "mlp"}, "data": {"name": "digits"}, "dir": str(tmp_path)}
    with (
        mpitrain.Trainer(MPI.COMM_SELF, **given) as trainer,
        pytest.raises(KeyboardInterrupt) as caught,
    ):
        trainer.fit(on_record=interrupt)
    (note,) = caught.value.__notes__
    assert note == f"fit(resume=True) goes on from what is in {tmp_path}/checkpoints"
