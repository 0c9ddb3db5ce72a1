"""``algorithm="auto"``: which algorithm a call gets, and why, by a table that was measured.

``python -m collectives tune`` measures one for a machine or an allocation; :mod:`.tables` finds it.
"""

from itertools import pairwise
from math import log2
from typing import Annotated, Literal, NamedTuple

import msgspec

from collectives.algorithms import REGISTRY, check, find, own, parse
from collectives.contracts import contract
from collectives.errors import UnknownAlgorithm

Kind = Literal["numpy", "shared", "cupy", "ipc"]
Positive = Annotated[float, msgspec.Meta(gt=0)]
Count = Annotated[int, msgspec.Meta(ge=1, le=(1 << 31) - 1)]
#: Memory that a program's own arrays lie in, and all where they may lie on a host.
ORDINARY: tuple[Kind, ...] = ("numpy",)
SHARED: tuple[Kind, ...] = ("numpy", "shared")
#: More bytes than there are: nothing of ours is faster.
NEVER = 1 << 62
#: A measurement says nothing about so many times more, or fewer, ranks than it was made on.
_FAR = 4


class Choice(NamedTuple):
    """An algorithm's name and the sentence that explains it."""

    algorithm: str
    reason: str


class Rule(msgspec.Struct, forbid_unknown_fields=True):
    """The algorithm from this many bytes on; ``ratio`` is native's time over its own."""

    from_bytes: Annotated[int, msgspec.Meta(ge=0)]
    algorithm: str
    ratio: Positive


class Entry(msgspec.Struct, forbid_unknown_fields=True):
    """The measurements of one collective on one kind of memory and number of ranks.

    Attributes:
        mpi: the library that native was (:func:`collectives.calls.native.library`).
        memory: kind of memory, as in :class:`Situation`.
        rules: by rising bytes.

    Raises:
        ValueError: an algorithm that the collective does not have, rules in another order, or more
            ranks on a node than there are.
    """

    mpi: str
    collective: str
    memory: Kind
    ranks: Count
    ranks_per_node: Count
    rules: list[Rule]

    def __post_init__(self) -> None:
        if self.ranks_per_node > self.ranks:
            raise ValueError(f"ranks_per_node = {self.ranks_per_node} of ranks = {self.ranks}")
        for rule, next_one in pairwise(self.rules):
            if rule.from_bytes >= next_one.from_bytes:
                raise ValueError(
                    f"rules go by rising from_bytes, and {next_one.from_bytes} comes after "
                    f"{rule.from_bytes}"
                )
        for rule in self.rules:
            check(self.collective, rule.algorithm)
            if rule.algorithm == "auto":
                raise ValueError("a rule names the algorithm that auto takes, not auto")
            if own(self.collective, rule.algorithm):
                raise ValueError(
                    f"a rule names one of the package's algorithms, and {rule.algorithm} was "
                    "registered by this program"
                )

    @property
    def ours_from(self) -> int:
        """Bytes from which an algorithm of ours is the fastest."""
        ours = (rule.from_bytes for rule in self.rules if rule.algorithm != "native")
        return min(ours, default=NEVER)


class BuiltIn(Entry):
    """An entry of the built-in table beside the user's, which come first."""


class Table(msgspec.Struct, forbid_unknown_fields=True):
    """A tuning table, as the file holds it.

    Attributes:
        environment: the machine and software of the measurements.
        alpha_us, bandwidth_GBs: cost of one message between two ranks, for the number of segments.
    """

    version: int
    environment: dict[str, object]
    alpha_us: Positive
    bandwidth_GBs: Positive
    entries: list[Entry]

    def entry(self, call: "Situation") -> Entry | None:
        """The entry with the nearest number of ranks, if it is near enough.

        Measurements on one node say nothing about several nodes, and one library's messages nothing
        about another's.  Shared memory does not depend on the library; native's time there does.
        """
        if call.is_of_slots and (call.unordered or call.uneven):
            return None

        def apart(entry: Entry) -> tuple[float, float]:
            ranks, per_node = call.size / entry.ranks, call.per_node / entry.ranks_per_node
            return abs(log2(ranks)), abs(log2(per_node))

        def distance(entry: Entry) -> tuple[bool, bool, float]:
            return entry.mpi != call.mpi, isinstance(entry, BuiltIn), sum(apart(entry))

        fitting = (
            entry
            for entry in self.entries
            if (entry.collective, entry.memory) == (call.collective, call.memory)
            and (entry.ranks == entry.ranks_per_node) == (call.size == call.per_node)
            and (entry.mpi == call.mpi or call.memory == "shared")
            and max(apart(entry)) <= log2(_FAR)
        )
        return min(fitting, key=distance, default=None)

    def native_below(self, call: "Situation", memories: tuple[Kind, ...]) -> int:
        """Bytes below which the MPI library serves such a call best in each kind of memory."""
        calls = [call._replace(memory=memory) for memory in memories]
        found = [(one, entry) for one in calls if (entry := self.entry(one)) is not None]
        return min((entry.ours_from * one.messages(entry) for one, entry in found), default=NEVER)


class Situation(NamedTuple):
    """A call as the tuning table sees it; the same on all ranks.

    Attributes:
        mpi: the library (:func:`collectives.calls.native.library`).
        nbytes: size of the largest buffer; 0 where ranks do not know it (v-variants).
        per_node: ranks of a node.
        commutes: whether the operation commutes (true where there is none).
        native: whether this MPI can do it: has the datatype, and can count the items.
        uneven: whether blocks differ in length.
        memory: kind of memory: ``"numpy"``, ``"shared"`` (all ranks can address it), ``"cupy"`` or
            ``"ipc"`` (on a GPU, and all ranks can address it).
        has_checksums: whether messages must carry checksums.
        delays: whether messages arrive as over a slower link.
        nccl: whether NCCL can do it, as far as the call alone says.
        unordered: whether the ranks may begin its runs in another order, as of nonblocking calls
            and plans.  In ordinary memory of one node such a call stays the library's.
        even: whether all nodes have as many ranks, numbered node by node.
    """

    mpi: str
    collective: str
    nbytes: int
    size: int
    per_node: int
    commutes: bool = True
    native: bool = True
    uneven: bool = False
    memory: Kind = "numpy"
    has_checksums: bool = False
    delays: bool = False
    nccl: bool = False
    unordered: bool = False
    even: bool = True

    @property
    def is_of_slots(self) -> bool:
        """Whether what was measured for it went through slots."""
        return self.memory == "numpy" and self.size == self.per_node

    def messages(self, entry: Entry) -> int:
        """How many times the messages of the ranks that were measured each rank has, where these
        cost something: in ordinary memory of one node.  A rule holds from as many times the bytes
        on, as a message then has what it had there."""
        if not self.is_of_slots or self.size <= entry.ranks:
            return 1
        return (self.size - 1) // max(1, entry.ranks - 1)

    def allows(self, algorithm: str) -> bool:
        """Whether ``algorithm`` can serve the call."""
        name, options = parse(algorithm)
        if name in ("native", "nccl"):
            return self.native if name == "native" else self.nccl
        entry = find(self.collective, name)
        follows = self.even and options.get("local", self.per_node) == self.per_node
        if "local" in entry.options and not follows:
            return False
        ordered = self.commutes or entry.keeps_order or contract(self.collective).idempotent
        if not ordered or (self.uneven and not entry.uneven):
            return False
        options.pop("segments", None)
        try:  # which the call does next, and builds no rounds; what takes long is kept
            REGISTRY.schedule(self.collective, name, self.size, 0, **options)
        except UnknownAlgorithm:  # measured on more ranks, or on fewer
            return False
        return True


_KINDS = {
    "shared": " in shared memory",
    "cupy": " in device memory",
    "ipc": " in device memory that the ranks share",
}
#: From here on, on a GPU, the ring's bandwidth is worth its rounds (as in NCCL).
_RING_BYTES = 1 << 20
#: Up to here two ranks that share a GPU's memory exchange whole buffers in the one round of a
#: butterfly (docs/figures/h100/allreduce_ipc.txt).
_ONE_ROUND_BYTES = 32 << 20
#: Where the table's choice cannot be: these keep rank order, take unequal blocks, or both.
_WITHOUT_TABLE = {
    "allreduce": "butterfly",
    "reduce_scatter": "direct",
    "allgather": "direct",
    "alltoall": "pairwise",
    "broadcast": "binomial_tree",
    "reduce": "direct",
    "gather": "direct",
    "scatter": "direct",
    "scan": "recursive_doubling",
    "exscan": "recursive_doubling",
    "barrier": "dissemination",
}


def choose(table: Table, call: Situation) -> Choice:
    """The algorithm for a call; a function of what all ranks agree on, so all choose the same."""
    kind = _KINDS.get(call.memory, "")
    where = f"{call.nbytes} bytes{kind}, {call.size} rank{'s' * (call.size > 1)}"
    entry = table.entry(call)
    if call.size > 1 and entry is not None:
        nbytes = call.nbytes // call.messages(entry)
        rules = [rule for rule in entry.rules if rule.from_bytes <= nbytes]
        if rules and call.allows(rules[-1].algorithm):
            rule = rules[-1]
            algorithm = rule.algorithm
            measured = f"in the table for {entry.ranks} ranks"
            if algorithm == "native":
                return Choice("native", f"{where}: fastest {measured}")
            gain = f"{rule.ratio:.1f}x native {measured}"
            if call.is_of_slots and call.size > entry.ranks == 2 and algorithm == "butterfly":
                # On two ranks it is one exchange; on more, direct has the fewest bytes and rounds.
                return Choice("direct", f"{where}: the butterfly is {gain}")
            return Choice(algorithm, f"{where}: {gain}")
    if call.native:
        return Choice("native", f"{where}: {_why_not(call, entry)}")
    reason = "this MPI has no such datatype, count or arithmetic"
    if call.has_checksums:
        reason = f"{where}: native's messages carry no checksums"
    if call.delays:
        reason = f"{where}: native ignores the modelled link"
    if call.memory in ("cupy", "ipc"):
        reason = f"{where}: MPI's own collectives on device memory stage badly or crash"
    if call.memory == "ipc" and call.collective == "allreduce" and call.allows("direct"):
        is_one_round = call.size == 2 and call.nbytes < _ONE_ROUND_BYTES
        return Choice("butterfly" if is_one_round else "direct", reason)
    if call.memory == "cupy" and call.collective == "allreduce" and call.commutes:
        return Choice("ring" if call.nbytes >= _RING_BYTES else "butterfly", reason)
    return Choice(_WITHOUT_TABLE[call.collective], reason)


def _why_not(call: Situation, entry: Entry | None) -> str:
    """Why the table says nothing about a call."""
    if call.size == 1:
        return "a rank alone"
    if call.collective == "barrier":
        return "barriers are not measured"
    if call.is_of_slots and (call.unordered or call.uneven):
        return f"{'as a plan' if call.unordered else 'of unequal blocks'}, in ordinary memory"
    if entry is None:
        nodes = "one node" if call.size == call.per_node else "several nodes"
        what = f"{call.collective}{_KINDS.get(call.memory, ' of ordinary arrays')}"
        missing = f"the table has no {what} with {call.mpi} on about {call.size} ranks of {nodes}"
        if call.memory in ("cupy", "ipc"):  # which tune leaves out
            return missing
        return f"{missing}; {tune(call.size, call.per_node)} measures it"
    rules = [rule for rule in entry.rules if rule.from_bytes <= call.nbytes]
    if not rules:
        return f"the table for {entry.ranks} ranks has none for so few bytes"
    return f"{rules[-1].algorithm}, fastest in the table for {entry.ranks} ranks, cannot serve it"


def tune(size: int, per_node: int) -> str:
    """The command that measures so many ranks."""
    if size == per_node:
        return f"mpirun -n {size} python -m collectives tune"
    asked = f"--nodes {-(-size // per_node)} --ranks-per-node {per_node}"
    return f"mpitrain submit {asked} -m collectives tune"
