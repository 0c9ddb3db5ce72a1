"""Tables, page and trace of a run, as ranks have spent their time."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from collectives.analysis.page import fill
from collectives.files import replace
from collectives.run.record import Site
from collectives.run.waits import Cost, Ran, Wait, costs, finding, sampled

#: Lines of a table that is printed.
_MOST = 24


def times(spent: Sequence[Mapping[str, float]]) -> str:
    """The seconds of each rank, and its shares of computing, communicating and waiting; of many
    ranks, those that compute longest."""
    lines = ["  rank    seconds  computing  communicating  waiting"]
    order = sorted(range(len(spent)), key=lambda rank: -spent[rank]["computing"])
    for rank in sorted(order[:_MOST]):
        total = sum(spent[rank].values())
        shares = [seconds / (total or 1.0) for seconds in spent[rank].values()]
        told = "{:10.1%} {:14.1%} {:8.1%}".format(*shares)
        lines.append(f"{rank:6} {total:10.6f} {told}")
    if len(spent) > _MOST:
        lines.append(f"       and {len(spent) - _MOST} more ranks, which compute less")
    return "\n".join(lines)


def sites(found: Sequence[Cost]) -> str:
    """The call sites that cost most; seconds are sums over the ranks."""
    lines = [
        "    calls      bytes  mean ms   seconds  waiting  slowest rank   comes last   call site"
    ]
    for cost in found[:_MOST]:
        calls, seconds = sum(cost.calls), sum(cost.seconds)
        slow = max(range(len(cost.seconds)), key=cost.seconds.__getitem__)
        late, waited = max(cost.late, key=cost.late.__getitem__, default=-1), sum(cost.waited)
        last = f"{late} ({cost.late[late] / waited:.0%})" if waited > 0.01 * seconds else "-"
        slowest = f"{slow} ({cost.seconds[slow]:.3g} s)"
        lines.append(
            f"{calls:9} {sum(cost.nbytes):10.3g} {1e3 * seconds / calls:8.3f} {seconds:9.3f} "
            f"{waited / (seconds or 1.0):8.1%}  {slowest:13}  {last:10}   {cost.where}"
        )
    return "\n".join(lines)


def gains(found: Sequence[Site]) -> str:
    """Which algorithm each collective of this rank took, call site by call site."""
    lines = ["    calls      bytes  algorithm and why, at the call site"]
    for site in sorted(found, key=lambda site: -site.nbytes):
        for (algorithm, why), calls in site.took.items():
            nbytes = site.nbytes * calls / site.calls
            lines.append(f"{calls:9} {nbytes:10.3g}  {algorithm} ({why}), {site.where}")
    return "\n".join(lines)


def write(ranks: Sequence[Ran], file: str, halved: int) -> str:
    """Writes ``file.html`` and ``file.json``; returns what is printed.

    Args:
        halved: how often the sample was halved.
    """
    waits = sampled(ranks)
    found = costs(ranks, waits)
    spent = []
    for rank, ran in enumerate(ranks):
        inside, waiting = (sum(getattr(c, n)[rank] for c in found) for n in ("seconds", "waited"))
        rest = max(0.0, ran.seconds - inside), max(0.0, inside - waiting), waiting
        spent.append(dict(zip(("computing", "communicating", "waiting"), rest)))
    said = finding(ranks, found)
    text = f"{said}\n\n{times(spent)}\n\n{sites(found)}"
    if halved:
        text += f"\n\nwaits are those of a sample: 1 call in {1 << halved}"
    calls = [
        [[*wait[:2], ran.sites[wait.site].where, *wait[3:]] for wait in own]
        for ran, own in zip(ranks, waits)
    ]
    data = {"text": text, "calls": calls}
    replace(Path(f"{file}.html"), fill("collectives.run", "profile.html", said, data))
    replace(Path(f"{file}.json"), json.dumps(chrome(calls)))
    return f"{text}\n\n{file}.html has the timeline; https://ui.perfetto.dev opens {file}.json"


def chrome(calls: Sequence[Sequence[Sequence[Any]]]) -> dict[str, Any]:
    """A Chrome trace with a thread for each rank; each call, and within it its wait."""
    events: list[dict[str, Any]] = []
    for rank, own in enumerate(calls):
        row = {"pid": 0, "tid": rank}
        events.append({**row, "ph": "M", "name": "thread_name", "args": {"name": f"rank {rank}"}})
        for begun, ended, where, waited, late in own:
            spans = [(where, "communicate", ended - begun)]
            spans += [(f"waits for rank {late}", "wait", waited)] if waited else []
            events += [
                {
                    **row,
                    "ph": "X",
                    "name": name,
                    "cat": kind,
                    "ts": 1e6 * begun,
                    "dur": 1e6 * lasted,
                }
                for name, kind, lasted in spans
            ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}
