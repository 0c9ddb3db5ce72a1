"""Ranks in words: who waits for whom, and how each has spent its time."""

import sys
from collections.abc import Sequence

from collectives import extras
from collectives.virtual.rank import Rank


def deadlock(ranks: Sequence[Rank]) -> str:
    """Who waits for whom, and where: a line for each rank."""
    frames = sys._current_frames()
    lines = ["all ranks wait, and nothing can end that:"]
    for rank in ranks:
        if rank.state == "ended":
            lines.append(f"  rank {rank.number} has ended")
            continue
        waits = rank.waits or rank.looked
        what = waits.what if waits else "polls, and nothing of its own is under way"
        if missing := [str(peer) for peer in waits.peers()] if waits else []:
            some = ", ".join(missing[:8]) + (" and others" if len(missing) > 8 else "")
            verb = "waits" if rank.state == "waits" else "polls"
            what += f", and {verb} for rank{'s' if len(missing) > 1 else ''} {some}"
        code, line = extras.call_site(frames.get(rank.thread.ident or 0) if rank.thread else None)
        place = f", at {code.co_filename}:{line} in {code.co_name}" if code else ""
        lines.append(f"  rank {rank.number} {what}{place}{waits.lying() if waits else ''}")
    return "\n".join(lines)
