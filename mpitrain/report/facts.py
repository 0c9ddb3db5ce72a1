"""Facts of a report, computed from a run's records and its trace."""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from mpitrain.config import Config, by_key
from mpitrain.metrics.reader import Log
from mpitrain.metrics.records import Back, Epoch, RankTime, Skipped, Start, Step, Times
from mpitrain.metrics.words import counted, in_words, measured

#: A rank is named if waits for it take at least this share of all communication.
_MOSTLY = 0.5


@dataclass(frozen=True)
class Rank:
    """Time of one rank in seconds.

    Attributes:
        computing: its own work.
        reduction: sums of gradients, with the waits in them.
        waiting: waits for other stages' activations, and for the last rank at the end of a step.
        waited_for: waits within ``reduction`` and ``waiting``, by the awaited rank.
        memory: peak memory of its process in bytes; 0 if unknown.
    """

    computing: float
    reduction: float
    waiting: float
    waited_for: Mapping[int, float]
    memory: int

    @property
    def seconds(self) -> float:
        return self.computing + self.reduction + self.waiting


def ranks(times: Sequence[RankTime]) -> list[Rank]:
    """Times of the ranks, with their waits for one another.

    All ranks leave a sum of gradients, and the end of a step, together.  So the rank with the least
    time in them comes last, and the additional time of others is waiting for it.
    """
    if not times:
        return []
    met = [time.reducing + time.meeting for time in times]
    least = min(met)
    last = met.index(least)
    found = []
    for rank, time in enumerate(times):
        whom = defaultdict(float, time.waiting)
        if met[rank] > least:
            whom[last] += met[rank] - least
        waiting = time.meeting + sum(time.waiting.values())
        found.append(Rank(time.computing, time.reducing, waiting, dict(whom), time.memory))
    return found


def waited_for(found: Sequence[Rank]) -> dict[int, float]:
    """Waits of all ranks together, in seconds, by the awaited rank; the longest first."""
    totals: dict[int, float] = defaultdict(float)
    for rank in found:
        for other, seconds in rank.waited_for.items():
            totals[other] += seconds
    return dict(sorted(totals.items(), key=lambda item: -item[1]))


def answer(log: Log, found: Sequence[Rank]) -> str:
    """One sentence: result, time, place, share of communication, status."""
    start, steps = log.start(), log.of(Step)
    seconds = sum(step.seconds for step in steps)
    parts = [
        f"{_quality(log, steps)} after {counted(steps[-1].step, 'step')} in {duration(seconds)} "
        f"on {counted(start.ranks, 'rank')} of {where(start)}"
    ]
    if start.ranks > 1:
        reducing = _share(steps, "comm_share")
        waiting = _share(steps, "wait_share")
        share = f"{reducing + waiting:.0%} of the time in communication"
        parts.append(share + _reason(found, reducing, waiting))
    return "; ".join([*parts, status(log)]) + "."


def _quality(log: Log, steps: Sequence[Step]) -> str:
    summary = log.summary()
    tested = log.last(Epoch) if summary is None else summary if summary.tested else None
    if tested is None:
        when = "without a test" if summary else "not tested yet"
        return f"Training loss {number(steps[-1].loss)}, {when},"
    loss = f"test loss {number(tested.test_loss)}"
    told = measured(tested.metrics)
    return f"{told[0].upper()}{told[1:]} in tests ({loss})" if told else loss.capitalize()


def _reason(found: Sequence[Rank], reducing: float, waiting: float) -> str:
    totals = waited_for(found)
    whole = sum(rank.reduction + rank.waiting for rank in found)
    if totals:
        slowest = next(iter(totals))
        if totals[slowest] >= _MOSTLY * whole:
            return f", mostly waiting for rank {slowest}"
    if waiting < 0.005:
        return ", all of it the reduction of gradients" if reducing >= 0.005 else ""
    return f" ({reducing:.0%} reduction of gradients, {waiting:.0%} waiting)"


def served(steps: Sequence[Step]) -> str:
    """Lags and bytes of a run's servers; empty without servers."""
    found = [step.served for step in steps if step.served]
    pushes = sum(one.pushes for one in found)
    if not pushes:
        return ""
    lag = sum(one.lag * one.pushes for one in found) / pushes
    return (
        f"{pushes} push{'es' if pushes > 1 else ''} on parameters that "
        f"lacked {number(lag)} on average, {max(one.lag_max for one in found)} at most; the "
        f"slowest worker at most {counted(max(one.behind_max for one in found), 'clock')} behind; "
        f"{in_words(sum(one.pushed_bytes for one in found))} pushed, "
        f"{in_words(sum(one.pulled_bytes for one in found))} pulled"
    )


def synced(steps: Sequence[Step]) -> str:
    """Exchanges of a run's workers; empty if they summed the gradients of each step."""
    found = [step.sync for step in steps if step.sync]
    if not found:
        return ""
    return (
        f"{counted(found[-1].exchanges, 'exchange')} in {counted(steps[-1].step, 'step')}; the "
        f"workers strayed from what they all had by {max(one.drift for one in found):.2g} of it at "
        "most"
    )


def sent(steps: Sequence[Step]) -> str:
    """Bytes that a rank sent in a step; empty if they were not counted."""
    moved = sum(step.sent_bytes + step.shared_bytes for step in steps)
    if not moved:
        return ""
    return f"{in_words(moved / len(steps))} a step and rank, {in_words(moved)} in all"


def status(log: Log) -> str:
    """End of the run, or why there is none."""
    if summary := log.summary():
        return f"finished{summary.ended and f' ({summary.ended})'}"
    if log.cut_off:
        return "not finished: it was killed while it wrote its last line, or is writing it now"
    if log.since_start().of(Times):
        return "stopped on request, and can be resumed"
    return "not finished: it is running, or was killed"


def devices(start: Start) -> list[tuple[str, str]]:
    """A row with the ranks' devices, if there are others than the CPU."""
    kinds = Counter(start.devices)
    if not kinds.keys() - {"cpu"}:
        return []
    told = (f"{name} ({counted(count, 'rank')})" for name, count in kinds.items())
    return [("devices", ", ".join(told))]


def where(start: Start) -> str:
    """Host of the run, or number and names of its hosts."""
    hosts = list(dict.fromkeys(process.rpartition(":")[0] for process in start.processes))
    if len(hosts) == 1:
        return hosts[0]
    some = ", ".join(hosts[:4]) + (", ..." if len(hosts) > 4 else "")
    return f"{len(hosts)} hosts ({some})"


def curve(log: Log) -> list[tuple[int, Epoch]]:
    """Tests with the steps before them."""
    done, found = 0, []
    for record in log.records:
        if isinstance(record, Step | Skipped | Back):
            done = record.step
        elif isinstance(record, Epoch):
            found.append((done, record))
    return found


def changed(config: Mapping[str, Mapping[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Settings that differ from the defaults, with these defaults, and the other settings."""
    defaults = by_key(msgspec.to_builtins(Config()))
    told = by_key(config)
    other = {key: value for key, value in told.items() if _same(value, defaults.get(key, _NONE))}
    return {key: defaults.get(key) for key in told if key not in other}, other


_NONE = object()


def _same(value: object, default: object) -> bool:
    if isinstance(value, list | tuple) and isinstance(default, list | tuple):
        return list(value) == list(default)
    return value == default


def _share(steps: Sequence[Step], name: str) -> float:
    seconds = sum(step.seconds for step in steps)
    return sum(step.seconds * getattr(step, name) for step in steps) / seconds if seconds else 0.0


def number(value: float) -> str:
    return f"{value:.4g}"


def duration(seconds: float) -> str:
    """``0.42 s``, ``9.1 s``, ``4 min 10 s``, ``2 h 05 min``, ``nan s``."""
    if not math.isfinite(seconds):
        return f"{seconds} s"
    if seconds < 1:
        return f"{seconds:.2f} s"
    if seconds < 59.95:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"
