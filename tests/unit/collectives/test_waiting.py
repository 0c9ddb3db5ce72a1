import time

from collectives.execution import waiting


def ways(monkeypatch, looks, yield_s):
    """The ways in which a thread that waits gives its core away, one a look."""
    now, found = [0.0], []

    def spend(name, seconds):
        found.append(name)
        now[0] += seconds

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: spend("sleep", 7e-5))
    monkeypatch.setattr(waiting.os, "sched_yield", lambda: spend("yield", yield_s))
    monkeypatch.setattr(waiting, "_CORE", waiting._Core())
    for _ in range(looks):
        waiting.give_way()
    return found


def test_a_rank_that_has_its_core_for_itself_never_sleeps(monkeypatch):
    assert set(ways(monkeypatch, 100_000, 1e-6)) == {"yield"}
    assert not waiting.is_contended()


def test_a_rank_on_a_contended_core_sleeps_and_asks_again_a_few_times_a_second(monkeypatch):
    found = ways(monkeypatch, 20_000, 3e-3)  # 1.4 seconds
    assert waiting.is_contended()
    assert found[:2] == ["yield", "sleep"]
    assert 4 <= found.count("yield") <= 8


def test_a_rank_says_once_for_each_line_that_it_waits(monkeypatch, capsys):
    monkeypatch.setattr(waiting, "NOTE_S", -1.0)
    for looks in ([True], [False, False, True], [False, True]):
        waiting.wait_for(iter(looks).__next__, lambda: None)
    told = capsys.readouterr().err
    assert told.startswith("rank 0 has waited for ") and told.count("waited") == 1
    assert f"{__file__}:" in told
