"""Times of all ranks' acts, on one clock."""

import time
from contextlib import nullcontext
from itertools import islice

import pytest

from collectives import clocks
from mpitrain.metrics import trace as trace_module
from mpitrain.metrics.trace import Trace, read_trace
from mpitrain.start import start
from tests.mpi.mpitrain.layouts import RANKS, job

pytestmark = pytest.mark.at_most(5)


def test_clocks_of_other_machines_are_set_by_round_trips(comm, monkeypatch):
    ahead = 1000.0 * comm.rank
    monkeypatch.setattr(clocks, "clock", lambda: comm.rank)
    for module in (clocks, trace_module):
        monkeypatch.setattr(module, "perf_counter", lambda: time.perf_counter() + ahead)
    trace = Trace(comm.rank)
    trace.align(comm)
    comm.Barrier()
    with trace.span("now", "compute"):
        pass
    (span,) = trace._spans
    # So long may a rank be kept from the processor.
    assert max(abs(span.start - other) for other in comm.allgather(span.start)) < 100


def test_a_trace_of_all_ranks_on_one_clock(comm, folder):
    trace = Trace(comm.rank)
    trace.align(comm)
    config = job("gpt", pipe=RANKS)
    with start(comm, config, span=trace.span) as trainer:
        list(islice(trainer.run_epoch(0), 2))
    trace.write(comm, folder / "trace.json")
    comm.Barrier()
    spans = read_trace(folder / "trace.json")
    assert {span.rank for span in spans} == set(range(RANKS))
    parts = trainer.parts.passes.micro_batches
    for rank in range(RANKS):
        own = [span.name for span in spans if span.rank == rank and span.category == "compute"]
        assert own.count("F0") == own.count("B0") == 2
        assert len(own) == 2 * 2 * parts
    # A stage computes what the one before has sent.
    first = {(s.rank, s.name): s.start for s in reversed(spans) if s.category == "compute"}
    for rank in range(1, RANKS):
        assert first[rank, "F0"] > first[rank - 1, "F0"]


@pytest.mark.parametrize("error", [None, KeyError, ValueError])
def test_a_trace_is_written_after_the_ends_that_all_ranks_share(comm, folder, error):
    trace = Trace(comm.rank)
    with nullcontext() if error is None else pytest.raises(error):  # noqa: SIM117
        with trace.to_file(comm, folder / "trace.json", KeyError):
            with trace.span("F0", "compute"):
                pass
            if error:
                raise error
    comm.Barrier()
    if error is ValueError:
        assert not (folder / "trace.json").exists()
    else:
        assert len(read_trace(folder / "trace.json")) == comm.size
