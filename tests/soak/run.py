"""Carries out drawn calls, each beside plain mpi4py's on copies, and looks for what is left behind.

After each call, all bytes of the objects are compared with what they must be: the result where the
result goes, and what was there before everywhere else.
"""

import faulthandler
import gc
import os
import random
import sys
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import numpy as np
from mpi4py import MPI

from collectives import Communicator
from collectives.calls import bind
from collectives.calls.mpi4py_spec import TYPES
from tests.soak.calls import Draw, Drawn, Side
from tests.soak.kinds import ROOM, Made, Refused, Workshop

#: Calls that are drawn between two clean-ups; each is repeated up to 8 times.
ROUND = 100
#: Rounds that a communicator lives.
LIFE = 8
#: Rounds after which what is held is taken as the beginning.
WARM_UP = 1
#: What may be held more at the end.
MOST_DESCRIPTORS, MOST_MAPPED, MOST_RESIDENT = 4, 256 << 20, 64 << 20
#: Nonblocking calls and plans at the same time.
UNDER_WAY, PLANS = 3, 4
#: No call takes so long.
HANGS_S = 120.0


@dataclass
class Held:
    """What this process holds: file descriptors, bytes of address space, bytes of memory."""

    descriptors: int
    mapped: int
    resident: int

    @classmethod
    def now(cls) -> "Held":
        gc.collect()
        with open("/proc/self/statm") as file:
            mapped, resident = (os.sysconf("SC_PAGESIZE") * int(n) for n in file.read().split()[:2])
        return cls(len(os.listdir("/proc/self/fd")), mapped, resident)


@dataclass
class Report:
    """What came of it, on all ranks together; leaks are those of the rank that leaks most."""

    ranks: int
    seconds: float = 0.0
    calls: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    roads: Counter[str] = field(default_factory=Counter)
    differences: int = 0
    descriptors: int = 0
    mapped: int = 0
    resident: int = 0

    @property
    def is_good(self) -> bool:
        few = self.descriptors <= MOST_DESCRIPTORS and self.mapped <= MOST_MAPPED
        return not self.differences and few and self.resident <= MOST_RESIDENT

    def __str__(self) -> str:
        ways = ", ".join(f"{count} {way}" for way, count in sorted(self.calls.items()))
        roads = ", ".join(f"{count} {road}" for road, count in sorted(self.roads.items()))
        kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(self.kinds.items()))
        return (
            f"soak on {self.ranks} ranks: {self.calls.total()} calls ({ways}) in "
            f"{self.seconds:.0f} s, {self.differences} differences; descriptors "
            f"{self.descriptors:+d} (at most {MOST_DESCRIPTORS}), mapped "
            f"{self.mapped / 2**20:+.1f} MiB (at most {MOST_MAPPED >> 20}), resident "
            f"{self.resident / 2**20:+.1f} MiB (at most {MOST_RESIDENT >> 20})\n"
            f"roads on rank 0: {roads}\nbuffers of {len(self.kinds)} kinds: {kinds}"
        )


@dataclass
class Use:
    """One buffer in one call.

    Attributes:
        role: ``send`` or ``receive``.
        expected: all bytes of its memory afterwards.
        result: first and last byte of the result, where rounding may differ.
        scratch: first and last byte of what a library's own call may write over: what lies behind
            the result of an in-place Reduce_scatter, which MPI leaves open.
    """

    role: str
    side: Side
    made: Made
    specification: Any
    expected: np.ndarray
    result: tuple[int, int] | None = None
    scratch: tuple[int, int] | None = None


@dataclass
class Call:
    """A call under way: the request or plan, and this rank's buffers."""

    drawn: Drawn
    number: int
    uses: list[Use]
    request: Any = None


class Soak:
    """Runs drawn calls on a duplicate of ``world``; collective.

    Args:
        seed: of the calls, the same on all ranks.
        keep_going: differences after which it ends.
        limits: for :class:`~tests.soak.calls.Draw`: ``kinds``, ``names``, ``ways``.
        hint: printed with a difference: how to see it again.
        make: the communicator that is tried out; by default ours with its own settings.
    """

    def __init__(
        self,
        world: MPI.Intracomm,
        seed: int,
        keep_going: int = 1,
        limits: dict[str, list[str]] | None = None,
        hint: str = "python -m tests.soak",
        make: Callable[[MPI.Intracomm], Communicator] | None = None,
    ) -> None:
        self.plain = MPI.Intracomm(world).Dup()
        self.rank, self.size = world.rank, world.size
        self.seed, self.keep_going, self.limits, self.hint = seed, keep_going, limits or {}, hint
        self.make = make
        self.report = Report(self.size)
        self.comm: Communicator | None = None
        self.shop = Workshop(random.Random(f"{seed} of rank {self.rank}"))
        self.gapped: dict[str, MPI.Datatype] = {}
        self.under_way: list[Call] = []
        self.plans: list[Call] = []
        self.lists: dict[str, list[Any]] = {"send": [], "receive": []}
        self.last: dict[str, Made] = {}
        self.number = self.round = 0
        self.doing = "starting"

    def run(self, seconds: float = 0.0, rounds: int = 0, first: int = 0) -> Report:
        """So many rounds, or as many as fit into so many seconds.

        Args:
            first: number of the first round.
        """
        begun = time.monotonic()
        held = None
        over = threading.Event()
        threading.Thread(target=self._watch, args=(over,), daemon=True).start()
        try:
            with warnings.catch_warnings(), _at_all_sizes():
                warnings.simplefilter("ignore")  # of NumPy, for setting a.shape and a.dtype
                self.round = first
                while not self._is_over(begun, seconds, self.round - first, rounds):
                    if self.comm is None:
                        self.comm = (self.make or Communicator)(self.plain)
                    self._one_round()
                    self.round += 1
                    if (self.round - first) % LIFE == 0:
                        self._renew()
                    if self.round - first == WARM_UP:
                        held = Held.now()
                self._renew()
        finally:
            over.set()
        self._sum_up(held or Held.now(), time.monotonic() - begun)
        for datatype in self.gapped.values():
            datatype.Free()
        self.plain.Free()
        return self.report

    def _is_over(self, begun: float, seconds: float, done: int, rounds: int) -> bool:
        enough = done >= rounds if rounds else time.monotonic() - begun >= seconds
        differing = self.report.differences >= self.keep_going
        return bool(self.plain.bcast(enough or differing))

    def _renew(self) -> None:
        if self.comm is not None:
            self.comm.close()
            self.comm = None

    def _sum_up(self, before: Held, seconds: float) -> None:
        now, report = Held.now(), self.report
        grown = [
            now.descriptors - before.descriptors,
            now.mapped - before.mapped,
            now.resident - before.resident,
        ]
        most = np.array(grown)
        self.plain.Allreduce(MPI.IN_PLACE, most, MPI.MAX)
        report.descriptors, report.mapped, report.resident = most.tolist()
        report.kinds = sum(self.plain.allgather(report.kinds), Counter())
        report.seconds = seconds

    def _one_round(self) -> None:
        """Draws calls and carries them out; at the end nothing is kept."""
        draw = Draw(f"{self.seed}, round {self.round}", self.size, **self.limits)
        self.number = 0
        self._share(draw.rng)
        for _ in range(ROUND):
            drawn = draw.call()
            if draw.rng.random() < 0.03:
                self._share(draw.rng)
            for _ in range(drawn.again):
                if self.report.differences >= self.keep_going:
                    break
                self._carry_out(drawn, draw.rng)
            while self.under_way and (draw.rng.random() < 0.6 or len(self.under_way) > UNDER_WAY):
                self._end(self.under_way.pop(draw.rng.randrange(len(self.under_way))), draw.rng)
        while self.under_way:
            self._end(self.under_way.pop(), draw.rng)
        while self.plans:
            self._free(self.plans.pop())
        self.last.clear()
        for one in self.lists.values():
            one.clear()
        self.shop.forget()

    def _share(self, rng: random.Random) -> None:
        """Drops some of the arrays that the node shares, and makes others."""
        assert self.comm is not None
        count, kept = rng.randint(1, 4), rng.randint(0, 1)
        del self.shop.shared[kept:]
        self.doing = "Communicator.empty"
        while len(self.shop.shared) < count:
            self.shop.shared.append(self.comm.empty(ROOM, np.uint8))

    def _carry_out(self, drawn: Drawn, rng: random.Random) -> None:
        """One call from beginning to end, or, nonblocking, its beginning."""
        self.number += 1
        self.doing = f"call {self.number} of round {self.round}: {drawn}"
        self.report.calls[drawn.way] += 1
        call = Call(drawn, self.number, [])
        refused = ""
        try:
            self._prepare(call)
        except Refused as error:
            refused = f"refused: {error}"
        if self._agree(refused):
            self._release(call)
            return
        self._fill(call)
        method = getattr(
            self.comm, _METHODS[drawn.way].format(name=drawn.name, low=drawn.name.lower())
        )
        try:
            request = method(*self._arguments(drawn, call), **_asked(drawn))
            self._count_road()
            if drawn.way == "blocking":
                self._check(call)
                return
            call.request = request
            if drawn.way == "nonblocking":
                self.under_way.append(call)
                return
            self.plans.append(call)
            request.Start()
            request.Wait()
            self._check(call, keep=True)
            if len(self.plans) > PLANS:
                self._free(self.plans.pop(rng.randrange(len(self.plans))))
            if rng.random() < 0.5:
                self._again(rng.choice(self.plans))
        except Exception as error:
            self._fail(error)

    def _count_road(self) -> None:
        """How the call goes, for the report."""
        assert self.comm is not None
        plan = self.comm.last_plan
        name = "none" if plan is None else plan.algorithm.partition(" ")[0].partition(":")[0]
        self.report.roads["native" if name == "native" else "ours"] += 1

    def _again(self, call: Call) -> None:
        """Another run of a plan, with other numbers in the same buffers."""
        self.doing = f"plan of call {call.number} of round {self.round}, again: {call.drawn}"
        self.report.calls["again"] += 1
        self._fill(call)
        call.request.Start()
        while not call.request.Test():
            pass
        self._check(call, keep=True)

    def _end(self, call: Call, rng: random.Random) -> None:
        self.doing = f"the end of call {call.number} of round {self.round}: {call.drawn}"
        try:
            if rng.random() < 0.5:
                while not call.request.Test():
                    pass
            call.request.Wait()
        except Exception as error:
            self._fail(error)
        self._check(call)

    def _free(self, call: Call) -> None:
        call.request.Free()
        self._release(call)

    def _release(self, call: Call) -> None:
        for use in call.uses:
            self.shop.release(use.made)

    def _prepare(self, call: Call) -> None:
        """Makes this rank's buffers.

        Raises:
            Refused: one that was used before does not let itself be changed.
        """
        drawn = call.drawn
        for role, side in zip(("send", "receive"), drawn.sides[self.rank]):
            if not isinstance(side, Side):
                continue
            made = self._buffer(drawn, role, side)
            self.shop.hold(made)
            self.report.kinds[made.kind] += 1
            form = replace(side, form="type") if side.form == "bare" and not made.typed else side
            code = drawn.dtype.char
            given = form.specification(made.obj, self._type(drawn, side), code)
            if side.listed and isinstance(given, list):
                self.lists[role][:] = given
                given = self.lists[role]
            call.uses.append(Use(role, side, made, given, np.empty(0, np.uint8)))

    def _type(self, drawn: Drawn, side: Side) -> MPI.Datatype:
        """Of a buffer's items; types with gaps live as long as the soak."""
        code = drawn.dtype.char
        plain = TYPES[code]
        if side.extent == 1:
            return plain
        if code not in self.gapped:
            nbytes = side.extent * drawn.dtype.itemsize
            self.gapped[code] = plain.Create_resized(0, nbytes).Commit()
        return self.gapped[code]

    def _buffer(self, drawn: Drawn, role: str, side: Side) -> Made:
        """A new object, or that of the call before where it fits and nothing else uses it."""
        last = self.last.pop(role, None)
        keeps = side.kept and drawn.way == "blocking"
        if keeps and last is not None and self._fits(last, side.items, drawn.dtype):
            self.last[role] = last
            return last
        del last
        made = self.shop.make(side.kind, drawn.dtype, side.items)
        if drawn.way == "blocking":
            self.last[role] = made
        return made

    def _fits(self, made: Made, items: int, dtype: np.dtype) -> bool:
        """Whether an object has so many items of a type, and nothing that is under way uses it."""
        view = memoryview(made.obj)
        alike = view.nbytes == items * dtype.itemsize
        if isinstance(made.obj, np.ndarray):
            alike = alike and made.obj.dtype == dtype
        elif made.typed:
            alike = alike and view.format == dtype.char
        return alike and not {id(made.kept), id(made.base)} & self.shop.in_use.keys()

    def _fill(self, call: Call) -> None:
        """New numbers everywhere, and what plain mpi4py makes of them."""
        drawn = call.drawn
        rng = np.random.default_rng([self.seed, self.round, self.number, self.rank])
        for use in call.uses:
            memory = use.made.memory()
            memory[...] = np.frombuffer(rng.bytes(memory.size), np.uint8)
            first = use.made.offset
            items = memory[first : first + use.side.items * drawn.dtype.itemsize]
            items[...] = _numbers(rng, drawn, use.side.items).view(np.uint8)
            use.expected = memory.copy()
        self._expect(call)

    def _expect(self, call: Call) -> None:
        """Writes the result of the MPI library's own collective into what is expected."""
        drawn = call.drawn
        given: list[Any] = []
        uses = iter(call.uses)
        received = None
        for role, side in zip(("send", "receive"), drawn.sides[self.rank]):
            if not isinstance(side, Side):
                given.append(MPI.IN_PLACE if side else None)
                continue
            use = next(uses)
            first = use.made.offset + side.before * side.extent * drawn.dtype.itemsize
            last = first + side.used * side.extent * drawn.dtype.itemsize
            copy = use.expected[first:last].copy().view(drawn.dtype)
            datatype = self._type(drawn, side)
            given.append(
                [copy, datatype]
                if side.starts is None
                else [copy, list(side.counts), list(side.starts), datatype]
            )
            if role == "receive":
                received = (use, first, last, copy)
        in_place = drawn.name == "Reduce_scatter" and given[0] is MPI.IN_PLACE
        if in_place and received is not None and MPI.get_vendor()[0] != "Open MPI":
            copy = received[3]  # MPICH's own, in place, copies a block onto itself
            plain = TYPES[drawn.dtype.char]
            given = [[copy.copy(), plain], [copy[: drawn.counts[self.rank]], plain]]
        self.doing += " (plain mpi4py)"
        getattr(self.plain, drawn.name)(*_positions(drawn, given, drawn.counts))
        self.doing = self.doing.removesuffix(" (plain mpi4py)")
        if received is None:
            return
        use, first, last, copy = received
        if drawn.name == "Exscan" and self.rank == 0:
            return  # MPI says nothing of it, and we leave it alone
        if drawn.sides[self.rank][0] == "in place" and drawn.name.startswith("Reduce_scatter"):
            count = drawn.counts[self.rank] if drawn.counts else copy.size // self.size
            end, last = last, first + count * drawn.dtype.itemsize
            # MPI leaves open what lies behind it; other libraries were asked out of place above.
            untouched = MPI.get_vendor()[0] == "Open MPI"
            untouched &= np.array_equal(copy[count:].view(np.uint8), use.expected[last:end])
            use.scratch = None if untouched else (last, end)
            copy = copy[:count]
        use.expected[first:last] = copy.view(np.uint8)
        use.result = (first, last)

    def _arguments(self, drawn: Drawn, call: Call) -> list[Any]:
        given: list[Any] = []
        uses = iter(call.uses)
        for side in drawn.sides[self.rank]:
            if isinstance(side, Side):
                given.append(next(uses).specification)
            else:
                given.append(MPI.IN_PLACE if side else None)
        return _positions(drawn, given, drawn.counts if drawn.tells_counts else None)

    def _check(self, call: Call, keep: bool = False) -> None:
        """Compares all bytes of this rank's buffers; all ranks hear of a difference."""
        problem = ""
        for use in call.uses:
            problem = problem or _difference(call.drawn, use)
        if not keep:
            self._release(call)
        self._agree(problem)

    def _agree(self, problem: str) -> bool:
        """Prints what is wrong on any rank; collective."""
        told = [(rank, text) for rank, text in enumerate(self.plain.allgather(problem)) if text]
        if not told:
            return False
        self.report.differences += 1
        if self.rank == told[0][0]:
            listed = "".join(f"\n  rank {rank}: {text}" for rank, text in told)
            print(f"DIFFERENCE at {self.doing}{listed}\n{self._how()}", flush=True)
        return True

    def _fail(self, error: Exception) -> None:
        """A call that raised: the others may wait for it for ever."""
        text = "".join(traceback.format_exception(error))
        print(
            f"RAISED on rank {self.rank} at {self.doing}\n{text}{self._how()}",
            file=sys.stderr,
            flush=True,
        )
        time.sleep(1)  # for the others to say the same
        MPI.COMM_WORLD.Abort(1)

    def _how(self) -> str:
        return (
            f"again: mpiexec -n {self.size} {self.hint} --seed {self.seed} --first {self.round} "
            "--rounds 1"
        )

    def _watch(self, over: threading.Event) -> None:
        """Ends the job when nothing has moved for long."""
        doing, since = self.doing, time.monotonic()
        while not over.wait(1.0):
            if self.doing != doing:
                doing, since = self.doing, time.monotonic()
            if time.monotonic() - since > HANGS_S:
                print(
                    f"HANGS on rank {self.rank} for {HANGS_S:g} s at {doing}\n{self._how()}",
                    file=sys.stderr,
                    flush=True,
                )
                faulthandler.dump_traceback()
                os._exit(1)


@contextmanager
def _at_all_sizes() -> Iterator[None]:
    """Roads that are for large arrays take small ones, too."""
    with patch.object(bind, "SLOTS_FROM_BYTES", 1):
        yield


_METHODS = {"blocking": "{name}", "nonblocking": "I{low}", "persistent": "{name}_init"}


def _asked(drawn: Drawn) -> dict[str, str]:
    return {} if drawn.algorithm is None else {"algorithm": drawn.algorithm}


def _positions(drawn: Drawn, given: list[Any], counts: tuple[int, ...] | None) -> list[Any]:
    """The arguments in mpi4py's order."""
    match drawn.name:
        case "Barrier":
            return []
        case "Bcast":
            return [given[1], drawn.root]
        case "Reduce":
            return [*given, drawn.operation, drawn.root]
        case "Reduce_scatter":
            return [*given, counts, drawn.operation]
        case "Allreduce" | "Scan" | "Exscan" | "Reduce_scatter_block":
            return [*given, drawn.operation]
        case "Gather" | "Scatter" | "Gatherv" | "Scatterv":
            return [*given, drawn.root]
    return given


def _numbers(rng: np.random.Generator, drawn: Drawn, items: int) -> np.ndarray:
    """Whole numbers whose sums and products every type can hold, or any."""
    if drawn.dtype.kind == "b":
        return rng.integers(0, 2, items).astype(drawn.dtype)
    if drawn.whole:
        return rng.integers(1, 3, items).astype(drawn.dtype)
    values = rng.uniform(0.5, 1.5, items)
    if drawn.dtype.kind == "c":
        return (values + 1j * rng.uniform(-0.5, 0.5, items)).astype(drawn.dtype)
    return values.astype(drawn.dtype)


def _difference(drawn: Drawn, use: Use) -> str:
    """What is wrong with a buffer after a call, or nothing."""
    found = use.made.memory()
    expected = use.expected
    if use.scratch:
        first, last = use.scratch
        expected = expected.copy()
        expected[first:last] = found[first:last]
    if use.result and not drawn.is_exact:
        first, last = use.result
        got, wanted = (memory[first:last].copy().view(drawn.dtype) for memory in (found, expected))
        tolerance = 64 * float(np.finfo(drawn.dtype).eps)
        if np.allclose(got, wanted, rtol=tolerance, atol=tolerance):
            expected = expected.copy()
            expected[first:last] = found[first:last]
    if np.array_equal(found, expected):
        return ""
    at = int(np.flatnonzero(found != expected)[0])
    inside = use.result is not None and use.result[0] <= at < use.result[1]
    name = f"the {use.role} buffer, {use.made.kind}"
    if not inside:
        return f"{name}: byte {at} of its memory was {expected[at]} and has become {found[at]}"
    item = (at - use.result[0]) // drawn.dtype.itemsize
    first = use.result[0] + item * drawn.dtype.itemsize
    got, wanted = (
        memory[first : first + drawn.dtype.itemsize].copy().view(drawn.dtype)[0]
        for memory in (found, expected)
    )
    return f"{name}: item {item} of the result is {got}, plain mpi4py's {wanted}"
