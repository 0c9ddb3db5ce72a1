"""``autotune``: ``auto`` measures, when a kind of call first comes, what its table does not know.

A tuning table is measured on another day or on another machine.  With ``autotune=True``, the first
call of a kind (collective, kind of memory, size to a power of two) runs the MPI library's own
collective and the best of ours in turn, eight times, on scratch arrays of that size and memory.
Each run begins with a barrier.  The ranks take the largest of their times, so that all decide
alike.

Rank 0 adds the finding to a table of this host, in the format of ``collectives tune``.  It reads
that table when a communicator first needs it, and tells the others, whose files play no part.
"""

import logging
import os
import platform
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from collectives.calls.arguments import Arguments
from collectives.calls.bind import Binder
from collectives.calls.call import Call
from collectives.calls.native import can_be_native, fault_of_native, library
from collectives.calls.native_plan import NativePlan
from collectives.calls.parse_call import parse_call
from collectives.calls.rendezvous import Rendezvous
from collectives.calls.resources import Resources
from collectives.calls.tuner import AUTOTUNED_BYTES, Entry, Kind, Rule, Table, load
from collectives.errors import CollectiveError
from collectives.execution.memory import Items
from collectives.execution.plan import Plan
from collectives.execution.shared import Places
from collectives.files import replace as replace_file

Seconds = npt.NDArray[np.float64]
#: Rules by collective, kind of memory and log2 of bytes.
Findings = dict[tuple[str, Kind, int], Rule]

log = logging.getLogger("collectives")

#: Order of the runs; the first of each kind warms up.
ORDER = ("native", "ours", "native", "ours", "ours", "native", "native", "ours")
#: Calls of so many bytes and more are of one kind, and measured on so many.
_MOST_BYTES = 64 << 20


def table_of_host() -> Path:
    """The file ``collectives/HOST.json`` below ``$XDG_CACHE_HOME``, or below ``~/.cache``."""
    folder = os.environ.get("XDG_CACHE_HOME", "").strip() or "~/.cache"
    return Path(os.path.expanduser(folder)) / "collectives" / f"{platform.node()}.json"


class Autotune:
    """The findings of one communicator; its methods are called by all ranks in the same order."""

    def __init__(self, resources: Resources, rendezvous: Rendezvous, binder: Binder) -> None:
        self._resources = resources
        self._progress = resources.progress
        self._rendezvous = rendezvous
        self._binder = binder
        self._found: Findings | None = None

    def tuned(self, call: Call, places: Places | None, measures: bool) -> Call:
        """The call with the algorithm that is faster for it, where autotune has a say.

        Args:
            places: where all ranks' buffers lie, if that is in the node's memory.
            measures: measures what is not known; a nonblocking call does not wait for that.
        """
        if not self._is_worth_it(call):
            return call
        self._progress.expect_whole()
        memory = self._binder.memory_of(call, places)
        size = min(call.nbytes, _MOST_BYTES).bit_length() - 1
        if self._found is None:
            self._found = self._resources.gathered(self._remembered())[0]
        kind = (call.collective, memory, size)
        rule = self._found.get(kind)
        if rule is None:
            if not measures:
                return call
            rule = self._found[kind] = self._measured(call, memory, 1 << size)
            if self._resources.comm.rank == 0:
                self._write()
        ratio = "fastest" if rule.algorithm == "native" else f"{rule.ratio:.2f}x native"
        why = f"autotuned at {1 << size} bytes: {ratio}"
        return replace(call, algorithm=rule.algorithm, why=why)

    def _is_worth_it(self, call: Call) -> bool:
        """Whether two ways of a call are worth comparing; the same on all ranks."""
        settings = self._resources.settings
        if not settings.autotune or settings.needs_messages or call.algorithm != "auto":
            return False
        if call.counts is not None or call.is_on_device or call.nbytes < AUTOTUNED_BYTES:
            return False
        if call.op is not None and not call.op.is_predefined:
            return False
        if settings.reproducible and call.contract.reduces:
            return False  # another algorithm, other bits
        able = can_be_native(call) and not fault_of_native(call, planned=False)
        return able and call.member.size > 1 and call.collective != "barrier"

    def _measured(self, call: Call, memory: Kind, nbytes: int) -> Rule:
        """The faster one of native and the best of ours."""
        wait, channel = self._resources.wait, self._resources.channel
        self._progress.drain()
        ours = self._binder.best_of_ours(call, memory).algorithm
        arrays = [self._scratch(n, call, memory) for n in _lengths(call, nbytes)]
        algorithms = {"native": "native", "ours": ours}
        traffic, self._progress.traffic = self._progress.traffic, None  # counts the caller's calls
        try:
            plans = {turn: self._plan(_call_on(call, arrays, a)) for turn, a in algorithms.items()}
        finally:
            self._progress.traffic = traffic
        seconds = np.empty(len(ORDER))
        for number, turn in enumerate(ORDER):
            wait(channel.Ibarrier())
            begun = perf_counter()
            plans[turn]()
            seconds[number] = perf_counter() - begun
        for plan in plans.values():
            plan.Free()
        wait(channel.Iallreduce(MPI.IN_PLACE, seconds, MPI.MAX))
        ratio = float(f"{ratio_of(seconds):.3g}")
        about = f"{call.collective}, {memory}, {nbytes} bytes"
        log.info("autotune of %s: %s takes 1/%.2f of native's time", about, ours, ratio)
        return Rule(nbytes, ours, ratio) if ratio > 1 else Rule(nbytes, "native", 1.0)

    def _plan(self, call: Call) -> Plan | NativePlan:
        return self._binder.bind(call, self._rendezvous.places_of(call), planned=True)

    def _scratch(self, count: int, call: Call, memory: Kind) -> Items:
        """An array of zeros in such memory."""
        dtype, node = call.buffer.items.dtype, self._resources.node
        if memory == "shared" and node is not None:
            return node.empty((count,), dtype)
        items = np.empty(count, dtype)
        items.view(np.uint8)[...] = 0  # so that its pages are there
        if memory == "adopted":
            self._resources.share(items)
        return items

    @property
    def _here(self) -> tuple[str, int, int]:
        """The library and the ranks that findings are for."""
        return library(), self._resources.comm.size, self._resources.ranks_per_node

    def _remembered(self) -> Findings:
        """The findings in this rank's file."""
        here = self._here  # collective at its first use
        mine = [e for e in _entries() if (e.mpi, e.ranks, e.ranks_per_node) == here]
        return {
            (entry.collective, entry.memory, rule.from_bytes.bit_length() - 1): rule
            for entry in mine
            for rule in entry.rules
            if rule.algorithm != "nccl"
        }

    def _write(self) -> None:
        """Adds the findings to the file; where that cannot be, the log says so."""
        here, table, path = self._here, self._resources.table, table_of_host()
        found = {**self._remembered(), **(self._found or {})}
        others = [e for e in _entries() if (e.mpi, e.ranks, e.ranks_per_node) != here]
        rules: dict[tuple[str, Kind], list[Rule]] = {}
        for (collective, memory, _), rule in sorted(found.items(), key=lambda one: one[0]):
            rules.setdefault((collective, memory), []).append(rule)
        mine = [Entry(here[0], *kind, *here[1:], of_kind) for kind, of_kind in rules.items()]
        about: dict[str, object] = {"host": platform.node(), "made_by": "autotune"}
        made = Table(1, about, table.alpha_us, table.bandwidth_GBs, [*others, *mine])
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, msgspec.json.format(msgspec.json.encode(made), indent=1).decode())
        except OSError as error:
            log.warning("what autotune found is not remembered: %s: %s", path, error)


def ratio_of(seconds: Seconds) -> float:
    """Native's time over that of ours, by the medians of the runs after the first of each."""
    medians = []
    for name in ("native", "ours"):
        own = [t for t, turn in zip(seconds, ORDER) if turn == name]
        medians.append(float(np.median(own[1:])))
    return medians[0] / max(medians[1], 1e-9)


def _entries() -> list[Entry]:
    """The entries of the host's table; none if it cannot be read."""
    path = table_of_host()
    if not path.exists():
        return []
    try:
        return load(path).entries
    except CollectiveError as error:
        log.warning("%s; autotune begins a new one", error)
        return []


def _lengths(call: Call, nbytes: int) -> tuple[int, int]:
    """Items of a send and a receive buffer as the call's, in all of ``nbytes``; 0 for none."""
    blocks, member = call.contract, call.member
    itemsize = call.buffer.items.itemsize
    count = max(1, nbytes // (itemsize * blocks.blocks(member.size)))
    sent, received = count * blocks.send_blocks(member), count * blocks.recv_blocks(member)
    if call.aside:
        return 0, sent
    return sent if call.send is not None else 0, received if call.recv is not None else 0


def _call_on(call: Call, arrays: list[Items], algorithm: str) -> Call:
    """A call like this one on other arrays, by an algorithm."""
    given = call.arguments
    datatype = call.buffer.datatype if call.contract.reduces else MPI.BYTE

    def spec(of_caller: Any, items: Items) -> Any:
        if of_caller is None or of_caller is MPI.IN_PLACE:
            return of_caller
        return [items.view(np.uint8), datatype] if items.size else None

    send, recv = arrays
    arguments = Arguments(
        given.collective, spec(given.sendbuf, send), spec(given.recvbuf, recv), given.op, given.root
    )
    return parse_call(arguments, algorithm, call.member.rank, call.member.size)
