"""Drawn calls of every collective by every algorithm, beside NumPy's numbers.

All ranks draw a call alike: lengths, types, operation, root, form, memory, in place or not.  Each
rank draws for itself how it describes its buffers.
"""

import zlib
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

from collectives import CheckedTransport, Communicator, Link, delayed
from collectives.algorithms import find, names
from collectives.calls.fast_path import DTYPES as DTYPES_OF_MPI
from collectives.calls.mpi4py_spec import TYPES
from collectives.contracts import CONTRACTS, Member
from tests.mpi.collectives.forms import (
    FORMS,
    METHODS,
    Exported,
    Interface,
    by_address,
    run,
    tensor_of,
)

EVERYTHING = [
    (collective, algorithm)
    for collective in CONTRACTS
    if collective != "barrier"  # which has a test of its own
    for algorithm in (*names(collective), "native", "auto")
]
NARROW = [np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]
NARROW += [ml_dtypes.float8_e4m3fnuz, ml_dtypes.float8_e5m2fnuz]
SMALL = ["i1", "u1", "i2", "u2"]
DTYPES = [*SMALL, *SMALL, "i4", "u4", "i8", "u8", *NARROW, "f4", "f8", ">f8", "g", "F", "D", "?"]
#: Types that are moved only, most of which MPI does not have.
MOVED = ["S1", "S3", "U2", "V5", "u1,u2", "f4,f8", "M8[ns]", *DTYPES]
ALIKE = ["i4", "i8", "f4", "f8"]  # in the arithmetic of every MPI library
ARITHMETIC = {"SUM": np.add, "PROD": np.multiply}
ORDER = {"MAX": np.maximum, "MIN": np.minimum}
LOGIC = {"LAND": np.logical_and, "LOR": np.logical_or, "LXOR": np.logical_xor}
BITS = {"BAND": np.bitwise_and, "BOR": np.bitwise_or, "BXOR": np.bitwise_xor}
#: Operations by the kinds of NumPy's letters; ``V``: of ml_dtypes.
OPERATIONS = {"b": LOGIC, "c": ARITHMETIC, "i": ARITHMETIC | ORDER | LOGIC | BITS}
OPERATIONS |= {"u": OPERATIONS["i"], "f": ARITHMETIC | ORDER, "V": ARITHMETIC | ORDER}
STAYS = 77


@pytest.fixture(scope="module")
def comms(comm):
    """One with shared memory, one without, and two whose messages have something around them."""
    link = delayed(Link((1e-4, 3e-4), 1e9))
    with (
        Communicator(MPI.COMM_WORLD) as plain,
        Communicator(MPI.COMM_WORLD, transport=CheckedTransport) as checked,
        Communicator(MPI.COMM_WORLD, transport=link) as late,
    ):
        yield comm, plain, comm, checked, late


class Pool:
    """Arrays out of one piece of shared memory, so that calls come to the same memory again."""

    def __init__(self, memory):
        self.memory = memory
        self.used = 0

    def empty(self, size, dtype):
        begin = -(-self.used // 64) * 64
        self.used = begin + size * dtype.itemsize
        return self.memory[begin : self.used].view(dtype)


@dataclass
class Blocks:
    """A buffer of blocks that may have gaps between them."""

    memory: np.ndarray
    lengths: list[int]
    gap: int = 0

    @cached_property
    def starts(self):
        ends = np.cumsum([0, *self.lengths[:-1]]).tolist()
        return [end + self.gap * j for j, end in enumerate(ends)]

    def __getitem__(self, j):
        return self.memory[self.starts[j] :][: self.lengths[j]]

    def described(self, rng, unequal, derived):
        """In one of mpi4py's forms, which all name the same memory; ``derived`` is a type for it
        that is not MPI's own."""
        items, kind = self.memory, TYPES.get(self.memory.dtype.char)
        if items.dtype not in DTYPES_OF_MPI:  # whose letters mean other types to MPI
            kind = derived if rng.integers(2) else None
        if unequal and len(self.lengths) > 1:
            forms = [[items, (self.lengths, self.starts)]]
            if kind is not None:
                forms.append([items, (self.lengths, self.starts), kind])
                forms.append([items, self.lengths, np.array(self.starts), kind])
                forms.append([by_address(items), self.lengths, self.starts, kind])
            return forms[rng.integers(len(forms))]
        forms = [items]
        if items.dtype.type in NARROW and items.size and find_spec("torch"):
            forms.append(tensor_of(items))
        if kind is not None:
            forms += [[items, kind], (items, None, kind), [items, derived or kind]]
            forms += [[items, self.lengths[0], kind], [items.view(np.uint8), kind]]
            forms += [[by_address(items), kind]]
        if items.dtype in DTYPES_OF_MPI:
            forms += [memoryview(items), [items, items.dtype.char]]
        if items.dtype in DTYPES_OF_MPI and items.size and items.dtype.itemsize <= 8:
            forms += [Exported(items), Interface(items)]
        return forms[rng.integers(len(forms))]


def same(found, expected):
    """Whether they have the same numbers, or the same bytes if they are no numbers."""
    if found.dtype.kind in "iufcb":  # long doubles have bytes that nobody uses
        return np.array_equal(found, expected)
    return found.tobytes() == expected.tobytes()


class Drawn:
    """One call, as this rank makes it."""

    def __init__(self, comm, pool, collective, algorithm, seed):
        self.comm, self.pool, self.algorithm = comm, pool, algorithm
        self.seed = [seed, zlib.crc32(f"{collective} {algorithm}".encode())]
        self.contract, size = CONTRACTS[collective], comm.size
        rng = self.rng = np.random.default_rng(self.seed)
        native = algorithm == "native"
        can_differ = self.contract.block is not None and (
            algorithm in ("native", "auto") or find(collective, algorithm).uneven
        )
        self.unequal = bool(can_differ and rng.random() < 0.4)
        self.in_place = bool(rng.integers(2)) or collective == "broadcast"
        if native and collective == "alltoall" and self.unequal:
            self.in_place = False  # Open MPI's nonblocking one is wrong
        self.gap = int(rng.choice([0, 2])) if self.unequal and collective != "reduce_scatter" else 0
        self.form = FORMS[rng.integers(3)]
        self.root = int(rng.integers(size)) if self.contract.rooted else 0
        kinds = ALIKE if native else DTYPES if self.contract.reduces else MOVED
        self.dtype = np.dtype(kinds[rng.integers(len(kinds))])
        self.ops = OPERATIONS.get(self.dtype.kind, ORDER)
        self.op = [*self.ops][rng.integers(len(self.ops))]
        few = [0, 1, 2, 3, 7, 61, int(rng.integers(1, 71)), 5000]
        large = collective in ("allreduce", "reduce", "broadcast", "reduce_scatter")
        self.count = int(rng.choice([*few, 70_000 // size] if large else few))
        self.empty = pool.empty if rng.integers(2) and comm._engine.resources.node else np.empty
        self.member = Member(comm.rank, size, self.root)

    def __repr__(self):
        said = ("algorithm", "dtype", "op", "count", "root", "form", "in_place", "unequal", "gap")
        return f"{self.contract.collective}: { ({name: getattr(self, name) for name in said}) }"

    def lengths(self, member, buffer, number):
        """Items of this rank's blocks; blocks of one name have one length."""

        def length(j):
            if not self.unequal:
                return self.count
            name = np.atleast_1d(self.contract.block(member, buffer, j))
            if self.in_place:  # two ranks exchange blocks of one length
                name = np.sort(name)
            return int(np.random.default_rng([*self.seed, *name]).integers(9))

        return [length(j) for j in range(number)]

    def sent(self, rank):
        member = self.member._replace(rank=rank)
        number = self.contract.send_blocks(member)
        return [
            self.numbers(np.random.default_rng([*self.seed, rank, j]), length)
            for j, length in enumerate(self.lengths(member, "sendbuf", number))
        ]

    def numbers(self, rng, length):
        """Numbers whose sums and products of some ranks float32 has; of small integers, all."""
        kind = self.dtype
        if kind not in DTYPES:
            return np.frombuffer(rng.bytes(length * kind.itemsize), kind)
        if kind.kind in "iu" and kind.itemsize <= 2:
            info = np.iinfo(kind)
            return rng.integers(info.min, info.max, length, kind, endpoint=True)
        if kind.kind in "iub":
            return rng.integers(0, 2 if kind.kind == "b" else 50, length).astype(kind)
        if self.op == "PROD":
            return np.exp2(rng.integers(-1, 2, length)).astype(kind)
        return (rng.integers(-16, 17, length) / 16).astype(kind)

    def wanted(self, j):
        """Block ``j`` of what this rank receives; ``None`` if it is undefined."""
        value = self.contract.result(self.member, j)
        if value is None:
            return None
        every = [self.sent(rank)[value.chunk] for rank in value.ranks]
        if len(every) == 1:
            return every[0]
        if self.dtype.type in NARROW:  # rounded once
            wide = self.ops[self.op].reduce([block.astype(float) for block in every], axis=0)
            return wide.astype(np.float32).astype(self.dtype)
        return self.ops[self.op].reduce(every, axis=0).astype(self.dtype)

    def buffer(self, lengths, gap):
        size = sum(lengths) + gap * len(lengths)
        return Blocks(self.empty(size, self.dtype), lengths, gap)

    def check(self):
        """Makes the call; a blocking one again, by another operation, and on fewer items."""
        self.call()
        if self.form == "blocking":
            self.call()
            self.op = next(op for op in self.ops if op != self.op)
            self.call()
            self.count //= 2
            self.call()

    def call(self):
        self.make()
        run(self.comm, self.form, self.method, *self.given, **self.how)
        self.compare()

    def make(self):
        """Fills the buffers of the call, and describes them."""
        contract, member, mine = self.contract, self.member, self.sent(self.comm.rank)
        name, is_root = contract.collective, self.comm.rank == self.root
        received = self.lengths(member, "recvbuf", contract.recv_blocks(member))
        self.pool.used = 0
        send = self.buffer([len(block) for block in mine], self.gap if len(mine) > 1 else 0)
        recv = self.buffer(received, self.gap if len(received) > 1 else 0)
        place = contract.place(member) if self.in_place and contract.in_place else None
        front = self.in_place and name == "reduce_scatter"
        self.stays = self.in_place and name == "scatter" and is_root
        own = np.random.default_rng([*self.seed, self.comm.rank, 99])
        of_all = name == "reduce_scatter" and self.unequal
        spec = Blocks(send.memory, [send.memory.size]) if of_all else send
        derived = None
        if not (contract.reduces or self.algorithm == "native" or own.integers(3)):
            derived = MPI.BYTE.Create_contiguous(self.dtype.itemsize).Commit()
        sent = spec.described(own, self.unequal, derived) if mine else None
        into = recv.described(own, self.unequal, derived) if received else None
        if place is not None or front:
            sent, into = MPI.IN_PLACE, send.memory if front else into
        given = [into] if name == "broadcast" else [sent, MPI.IN_PLACE if self.stays else into]
        self.method = METHODS.get(name, name.capitalize()) + "v" * self.unequal
        if of_all:
            self.method = "Reduce_scatter"
            given.append(send.lengths)
        self.how = {"algorithm": self.algorithm}
        self.how |= {"op": getattr(MPI, self.op)} if contract.reduces else {}
        self.how |= {"root": self.root} if contract.rooted else {}
        send.memory.view(np.uint8)[...] = recv.memory.view(np.uint8)[...] = STAYS
        for j, block in enumerate(mine):
            send[j][...] = block
            if place is not None:
                recv[place + j][...] = block
        self.given, self.derived = given, derived
        self.unchanged = [] if front else [(send[j], block) for j, block in enumerate(mine)]
        self.recv = Blocks(send.memory, received) if front else recv

    def compare(self):
        recv = self.recv
        kept = np.ones(recv.memory.size, bool)
        for j, length in enumerate([] if self.stays else recv.lengths):
            kept[recv.starts[j] :][:length] = False
            expected = self.wanted(j)
            if expected is not None:
                assert same(recv[j], expected), self
        if recv.gap:
            assert (recv.memory[kept].view(np.uint8) == STAYS).all(), self
        assert all(same(*pair) for pair in self.unchanged), self
        if self.derived is not None:
            self.derived.Free()


@pytest.mark.parametrize(
    "calls", [8, pytest.param(300, marks=[pytest.mark.slow, pytest.mark.at_most(5)])]
)
@pytest.mark.parametrize(("collective", "algorithm"), EVERYTHING)
def test_drawn_calls_have_the_numbers_of_numpy(comms, collective, algorithm, calls):
    pool = Pool(comms[0].empty(1 << 23, np.uint8))
    for seed in range(calls):
        Drawn(comms[seed % 5], pool, collective, algorithm, seed).check()
