"""Tables, page and trace of a run, as ranks have spent their time."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from collectives.analysis.page import fill
from collectives.calls.tables import DEFAULT, source
from collectives.files import replace
from collectives.run.record import Site
from collectives.run.waits import Cost, Ran, costs, finding, sampled

#: Lines of a table.
_MOST = 24


def times(spent: Mapping[str, Mapping[str, float]]) -> str:
    """The seconds of each rank, and its shares of computing, communicating and waiting; of many
    ranks, those that compute longest."""
    lines = ["  rank    seconds  computing  communicating  waiting"]
    most = sorted(spent, key=lambda rank: -spent[rank]["computing"])[:_MOST]
    for rank in filter(most.__contains__, spent):
        total = sum(spent[rank].values())
        shares = [seconds / (total or 1.0) for seconds in spent[rank].values()]
        told = "{:10.1%} {:14.1%} {:8.1%}".format(*shares)
        lines.append(f"{rank:>6} {total:10.6f} {told}")
    return "\n".join(lines)


def sites(found: Sequence[Cost]) -> str:
    """The call sites that cost most; seconds are sums over the ranks."""
    lines = ["    calls      bytes  mean ms   seconds  waiting  longest in call  comes last   call"]
    for cost in found[:_MOST]:
        calls, seconds, waited = sum(cost.calls), sum(cost.seconds), sum(cost.waited)
        slow = max(range(len(cost.seconds)), key=lambda rank: cost.seconds[rank])
        late = max(cost.late, key=lambda rank: cost.late[rank], default=-1)
        last = f"{late} ({cost.late[late] / waited:.0%})" if waited > 0.01 * seconds else "-"
        lines.append(
            f"{calls:9} {sum(cost.nbytes):10.3g} {1e3 * seconds / calls:8.3f} {seconds:9.3f} "
            f"{waited / (seconds or 1.0):8.1%}  {f'{slow} ({cost.seconds[slow]:.3f} s)':15}  "
            f"{last:10}   {cost.where}"
        )
    return "\n".join(lines)


def gains(found: Iterable[Site]) -> str:
    """Algorithms that this rank's collectives took, call site by call site."""
    sites, table, ordinary = list(found), source(), False
    reasons = [why for site in sites for _, why in site.took if " of several nodes; " in why]
    lines = [f"chosen by {'the built-in table' if table == DEFAULT else table}; "]
    if reasons:
        measures = reasons[0].rpartition("; ")[2]
        lines[0] += f"it lacks rules of several nodes, where the library serves calls: {measures}"
    else:
        lines[0] += "nothing was measured in this run"
    lines += ["    calls      bytes  call, algorithm and why"]
    for site in sorted(sites, key=lambda site: -site.nbytes):
        for (algorithm, why), calls in site.took.items():
            nbytes = site.nbytes * calls / site.calls
            lines.append(f"{calls:9} {nbytes:10.3g}  {site.where}: {algorithm} ({why})")
            ordinary |= nbytes > 0 and not re.search("shared|device", why)
    if ordinary:
        lines.append("ordinary arrays; in those of comm.empty, ranks of one node may gain more")
    return "\n".join(lines)


def write(ranks: Sequence[Ran], file: Path, halved: int) -> str:
    """Writes ``file.html`` and ``file.json``, a Chrome trace; returns what is printed.

    Args:
        halved: how often the sample was halved.
    """
    waits = sampled(ranks)
    found = costs(ranks, waits)
    spent, rows = dict[str, dict[str, float]](), dict[tuple[int, int], int]()
    for rank, ran in enumerate(ranks):
        for number, thread in enumerate(dict.fromkeys([0, *(site.thread for site in ran.sites)])):
            own = [site for site in ran.sites if site.thread == thread]
            inside, waiting = sum(s.seconds for s in own), sum(s.waited for s in own)
            outside = sum(s.before for s in own) if thread else max(0.0, ran.seconds - inside)
            kinds = {"computing": outside, "communicating": inside - waiting, "waiting": waiting}
            rows[rank, thread] = len(rows)
            spent[f"{rank}.{number}" if number else f"{rank}"] = kinds
    said = finding(ranks, waits, found)
    text = f"{said}\n\n{times(spent)}\n\n{sites(found)}"
    if halved:
        text += f"\n\nwaits are those of a sample: 1 call in {1 << halved}"
    events: list[dict[str, Any]] = [
        {"pid": 0, "tid": row, "ph": "M", "name": "thread_name", "args": {"name": f"rank {name}"}}
        for row, name in enumerate(spent)
    ]
    for rank, calls in enumerate(waits):
        for call in calls:
            site = ranks[rank].sites[call.site]
            spans = [(site.where, "communicating", call.ended - call.begun)]
            if call.waited:
                spans.append((f"waits for rank {call.late}", "waiting", call.waited))
            for name, kind, lasted in spans:
                span = {"name": name, "cat": kind, "ts": 1e6 * call.begun, "dur": 1e6 * lasted}
                events.append({"pid": 0, "tid": rows[rank, site.thread], "ph": "X", **span})
    data = {"traceEvents": events, "text": text}
    page = fill("collectives.run", "profile.html", said, data)
    try:
        replace(file.with_name(f"{file.name}.html"), page)
        replace(file.with_name(f"{file.name}.json"), json.dumps(data))
    except OSError as error:
        return f"{text}\n\n{file}.html: {error.strerror}; name another file by --profile=FILE"
    return f"{text}\n\n{file}.html has the timeline; https://ui.perfetto.dev opens {file}.json"
