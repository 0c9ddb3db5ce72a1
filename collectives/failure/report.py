"""Reports made of the ranks' answers: who is missing, and which calls can never end."""

import linecache
import sys
import threading
import traceback
from collections.abc import Mapping
from functools import cache
from typing import Any

from mpi4py import MPI

from collectives.failure.abort import LIBRARIES
from collectives.failure.history import Entered, call_site
from collectives.failure.peers import Peers

#: Status of each rank that answered, by rank.
Answers = Mapping[int, Mapping[str, Any]]
#: Collectives that end on no rank before all ranks have called them.
_MEETINGS = ("allgather", "allreduce", "alltoall", "barrier", "reduce_scatter", "the end")
_SHOWN = 8


def is_meeting(call: Entered) -> bool:
    """Whether a call is a collective that needs all ranks."""
    return call.numbered and str(call.what[0]).partition(" of ")[0] in _MEETINGS


def missing(peers: Peers, number: int, answers: Answers) -> list[int]:
    """Ranks that have not called the collective of this number, or do not answer."""
    found = []
    for rank in range(peers.size):
        status = answers.get(rank)
        if status is None:
            if rank not in peers.ended or peers.ended[rank][0] < number:
                found.append(rank)
            continue
        # A rank that polls is in no call when it is asked; its last call says how far it is.
        polls = status["call"] is None and status["polls"]
        come = status["made"] if polls else status["number"]
        if come is None or come < number:
            found.append(rank)
    return found


def deadlock(peers: Peers, answers: Answers) -> str:
    """Sentence about two ranks that wait for each other; empty if there are none.

    No time is needed for the proof: a thread that waits in a collective makes no other call.
    """
    waiting = {rank: status for rank, status in answers.items() if status["meets"]}
    for rank, status in waiting.items():
        first, call, number = peers.job[rank], status["call"], status["number"]
        for other, its in answers.items():
            second = peers.job[other]
            if its["meets"] and its["number"] == number and _kind(its) != _kind(status):
                return (
                    f"rank {first} waits in {call} and rank {second} in {its['call']}, as the code "
                    "of one of them has left a collective out"
                )
            if not its["elsewhere"] or its["made"] >= number:
                continue
            if max(status["threads"], its["threads"]) > 1:  # another one may make the call yet
                continue
            where, at, what = its["elsewhere"][0]
            if where != peers.token and status["made_on"].get(where, at) < at:
                return (
                    f"rank {first} waits in {call} for rank {second}, which waits in {what} of "
                    f"another communicator for rank {first}"
                )
    return ""


def _kind(status: Mapping[str, Any]) -> str:
    """The collective that a rank is in, without what follows its name."""
    return str(status["what"]).partition(" ")[0].removesuffix("v")


def report(peers: Peers, call: Entered, answers: Answers, why: str) -> str:
    """Report about a call that has not ended or cannot end, as ``why`` says."""
    collective = f"collective number {call.number}"
    if not call.numbered:
        collective = f"wait behind {collective}"
    which = f"{collective} of {peers.group}" if peers.group else f"the ranks' {collective}"
    lines = [f"{which} {why}; rank {peers.job[peers.rank]}: {call}"]
    for rank, number in enumerate(peers.job):
        status = answers.get(rank)
        if status is None:
            lines.append(f"  rank {number} {peers.state(rank)}")
            continue
        polls = status["call"] is None and status["polls"]
        elsewhere = "it polls with Test" if polls else "it is busy elsewhere"
        there = status["call"] or f"none of them: {elsewhere}"
        lines.append(f"  rank {number} has completed {status['completed']}, is in {there}")
    absent = missing(peers, call.number, answers)
    who = ", ".join(str(peers.job[rank]) for rank in absent)
    lines.append(f"missing: rank {who or _nobody(call, answers)}")
    own = _kind(answers[peers.rank])
    others = absent or [rank for rank, status in answers.items() if _kind(status) != own][:1]
    for rank in [peers.rank, *(r for r in others if r in answers)]:
        lines.append(f"rank {peers.job[rank]} is here:\n{answers[rank]['stack']}")
    return "\n".join(lines)


def _nobody(call: Entered, answers: Answers) -> str:
    if not call.numbered:
        return "unknown, as only some of the ranks make this call"
    if len({status["what"] for status in answers.values()}) == 1:
        return "none: all are in the same call, which is slow; raise the timeout"
    return "none: all have made this call, not with the same words (check=True compares them)"


def note(peers: Peers, call: Entered, answers: Answers, seconds: float) -> str:
    """Note about the ranks that this rank waits for, and their lines of code; may be empty."""
    absent = missing(peers, call.number, answers) if call.numbered else []
    absent += [rank for rank in range(peers.size) if rank not in answers and rank not in absent]
    if not absent:
        return ""
    own = peers.job[peers.rank]
    lines = [
        f"rank {own} has waited for {seconds:.0f} s at {answers[peers.rank]['where']}",
        *(
            f"  for rank {peers.job[rank]}, which "
            + (f"is at {answers[rank]['where']}" if rank in answers else peers.state(rank))
            for rank in absent[:_SHOWN]
        ),
    ]
    if len(absent) > _SHOWN:
        lines.append(f"  and for {len(absent) - _SHOWN} more")
    lines.append("  and waits on; COLLECTIVES_TIMEOUT=S ends the job after S seconds")
    return "\n".join(lines)


def say_waiting(seconds: float) -> None:
    """Writes that this rank has waited for so long; once for each line, and not beside a watchdog,
    which knows more."""
    if any(thread.name == "watchdog" for thread in threading.enumerate()):
        return
    _say_waiting(place(), seconds)


@cache  # once for each place
def _say_waiting(where: str, seconds: float) -> None:
    print(
        f"rank {MPI.COMM_WORLD.rank} has waited for {seconds:.0f} s at {where}; another rank is "
        "late, or makes another call: COLLECTIVES_TIMEOUT=S tells after S seconds where all are, "
        "and COLLECTIVES_CHECK=1 which calls differ",
        file=sys.stderr,
        flush=True,
    )


def place() -> str:
    """Line of the user's code that the main thread is in, with its source."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    code, line = call_site(frame, LIBRARIES)
    if code is None:
        code, line = call_site(frame, ())
    if code is None:
        return "an unknown place"
    text = linecache.getline(code.co_filename, line).strip()
    return f"{code.co_filename}:{line} in {code.co_name}: {text}"


def stacks() -> str:
    """Stacks of all threads of this process except the watchdog's."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        name = names.get(ident, "?")
        if name == "watchdog" or ident == threading.get_ident():
            continue
        parts.append(f"thread {name}:\n{''.join(traceback.format_stack(frame))}")
    return "\n".join(parts)
