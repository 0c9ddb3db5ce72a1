"""A drawn program of plain mpi4py, for MPI ranks and virtual ones: ``FOLDER FIRST LAST``.

Each rank writes into ``FOLDER/RANK`` what each draw gave it, a line each.
"""

import random
import sys
import traceback
from pathlib import Path
from zlib import crc32

import numpy as np
from mpi4py import MPI

INTEGERS = ("i1", "u1", "i2", "i4", "i8", "u8")
DTYPES = (*INTEGERS, "f4", "f8", "c16")
#: Blocking, nonblocking, persistent.
FORMS = ("", "I", "_init")


def told(status):
    return status.source, status.tag, status.Get_count(MPI.BYTE), status.error, status.cancelled


#: Ways to end requests.
WAYS = [
    *("Wait", "wait", "Test", "test", "Get_status", "Waitall", "waitall", "Testall", "testall"),
    *("Waitany", "waitany", "Testany", "testany", "Waitsome", "waitsome", "Testsome", "testsome"),
]
#: Communicators, calls and ways of messages.
MADE = [
    *("world", "self", "dup", "idup", "split", "create", "group"),
    *("cart", "cart", "cart", "sub", "graph", "dist", "dist"),
]
SUMS = ["Reduce", "Allreduce", "Reduce_scatter_block", "Reduce_scatter", "Scan", "Exscan"]
MESSAGES = [
    *("Isend", "Issend", "Sendrecv", "Sendrecv_replace", "init", "Probe", "Mprobe", "Improbe"),
    *("objects", "sendrecv", "ends", "mixed"),
]
KINDS = [
    *("moves", "derived", "unequal", "sums", "pairs", "objects", "messages", "cancelled", "place")
]


class Drawn:
    """A draw: ``choose`` gives the same on all ranks, ``own`` numbers of this rank."""

    def __init__(self, seed):
        self.choose, self.found = random.Random(seed), []
        self.numbers = np.random.default_rng((seed, MPI.COMM_WORLD.rank))
        self.comm = self.made()

    def made(self):
        """A communicator that this rank is in, or ``None``."""
        world, size, pick = MPI.COMM_WORLD, MPI.COMM_WORLD.size, self.choose
        keys = [pick.randrange(9) for _ in range(size)]
        some = sorted(pick.sample(range(size), pick.randint(1, size)))
        dims = MPI.Compute_dims(size - pick.randrange(2) * (size > 2), pick.randint(1, 3))
        rings = [pick.random() < 0.5 for _ in dims]
        edges = [[pick.randrange(size) for _ in range(pick.randrange(4))] for _ in range(size)]
        both = [
            sorted({*edges[own], *(rank for rank in range(size) if own in edges[rank])})
            for own in range(size)
        ]
        targets = edges[world.rank]
        sources = [rank for rank, ends in enumerate(edges) for end in ends if end == world.rank]
        index = np.cumsum([len(ends) for ends in both]).tolist()
        own, group = world.rank, world.Get_group()
        kind = pick.choice(MADE)
        match kind:
            case "self":
                made = MPI.COMM_SELF
            case "dup":
                made = world.Dup()
            case "idup":
                made, request = world.Idup()
                request.Wait()
            case "split":
                made = world.Split(keys[own] % 2, keys[own])
            case "create":
                made = world.Create(group.Incl(some))
            case "group":
                made = world.Create_group(group.Incl(some)) if own in some else MPI.COMM_NULL
            case "cart" | "sub":
                made = world.Create_cart(dims, rings)
                if kind == "sub" and made:
                    made = made.Sub(rings[::-1])
            case "dist":
                made = world.Create_dist_graph_adjacent(sources, targets)
                if pick.random() < 0.5:
                    made = made.Dup()
            case "graph":
                made = world.Create_graph([0, *index], [end for ends in both for end in ends])
            case _:
                made = world
        self.found.append((kind, made != MPI.COMM_NULL))
        return None if made == MPI.COMM_NULL else made

    def array(self, count, dtype):
        return self.numbers.integers(0, 3, count).astype(dtype)

    def pick(self, several):
        """One of them, by this rank alone."""
        return several[self.numbers.integers(len(several))]

    def see(self, *arrays):
        for data in arrays:
            self.found.append(data.tolist() if data.size < 20 else crc32(data.tobytes()))

    def spec(self, data):
        """A buffer as mpi4py takes it, of all of ``data``."""
        datatype = MPI._typedict[data.dtype.char]
        size = data.size
        return self.pick(
            [data, [data, datatype], [data, size, datatype], [data, (size, 0), datatype]]
        )

    # Requests.

    def complete(self, requests, ways=WAYS):
        """Ends requests in a drawn way; the objects that have come, and statuses of messages."""
        kind, left, came = self.pick(ways), list(requests), {}
        statuses = [MPI.Status() for _ in left]
        call = getattr(MPI.Request, kind, None)
        if kind in ("Wait", "wait", "Test", "test", "Get_status"):
            for number, request in enumerate(left):
                if kind == "Get_status":
                    while not request.Get_status(statuses[number]):
                        pass
                    request.Wait()
                elif kind in ("Wait", "wait"):
                    came[number] = getattr(request, kind)(statuses[number])
                else:
                    method = getattr(request, "test" if kind == "test" else "Test")
                    while not (got := method(statuses[number])) or got == (False, None):
                        pass
                    came[number] = got[1] if kind == "test" else got
        elif kind in ("Waitall", "waitall", "Testall", "testall"):
            while True:
                got = call(left, statuses)
                flag, objects = got if kind == "testall" else (got is not False, got)
                if flag:
                    break
            came = dict(enumerate(objects)) if kind in ("waitall", "testall") else {}
        elif kind in ("Waitany", "waitany", "Testany", "testany"):
            for _ in left:
                status = MPI.Status()
                while True:
                    number, *rest = got if isinstance(got := call(left, status), tuple) else (got,)
                    if number != MPI.UNDEFINED:
                        break
                statuses[number], came[number] = status, rest[-1] if kind.islower() else True
            empty = MPI.Status()
            self.found.append((call(left, empty), told(empty)))
        else:
            while len(came) < len(left):
                some = []
                got = call(left, some)
                numbers, objects = got if kind.islower() else (got, None)
                for place, number in enumerate(numbers or ()):
                    statuses[number] = some[place]
                    came[number] = objects[place] if objects else True
            self.found.append(call(left, []))
        objects = [came.get(number) for number in range(len(left))] if kind.islower() else None
        self.found.append((kind, objects, [bool(request) for request in left]))
        return statuses

    def call(self, name, *given, form=None, again=False):
        """A collective in a drawn form; ``again``: it may run twice."""
        comm = self.comm
        form = self.choose.choice(FORMS) if form is None else form
        self.found.append((name, form))
        if form == "":
            getattr(comm, name)(*given)
        elif form == "I":
            self.complete([getattr(comm, f"I{name.lower()}")(*given)])
        else:
            request = getattr(comm, f"{name}_init")(*given)
            for _ in range(1 + again):
                request.Start()
                # MPICH's Testall takes a persistent collective for a failure.
                self.complete([request], [way for way in WAYS if way.lower() != "testall"])
            request.Free()

    # Kinds of calls.

    def moves(self):
        comm, pick = self.comm, self.choose
        size, rank, root = comm.size, comm.rank, pick.randrange(comm.size)
        count, dtype, in_place = pick.randrange(5), pick.choice(DTYPES), pick.random() < 0.4
        name = pick.choice(["Bcast", "Gather", "Scatter", "Allgather", "Alltoall"])
        one, whole = self.array(count, dtype), self.array(count * size, dtype)
        at_root = in_place and rank == root
        match name:
            case "Bcast":
                given = self.spec(one), root
            case "Gather":
                given = MPI.IN_PLACE if at_root else self.spec(one), whole if rank == root else None
                given += (root,)
            case "Scatter":
                given = whole if rank == root else None, MPI.IN_PLACE if at_root else self.spec(one)
                given += (root,)
            case "Allgather":
                given = MPI.IN_PLACE if in_place else self.spec(one), whole
            case _:
                given = MPI.IN_PLACE if in_place else self.array(count * size, dtype), whole
        self.call(name, *given, again=not in_place)
        self.see(one, whole)

    def derived(self):
        comm, pick = self.comm, self.choose
        count, dtype = pick.randint(1, 3), pick.choice(DTYPES)
        column = MPI._typedict[np.dtype(dtype).char].Create_vector(2, 1, 2)
        wide = column.Create_resized(0, 4 * np.dtype(dtype).itemsize).Commit()
        one, whole = self.array(4 * count, dtype), self.array(4 * count * comm.size, dtype)
        name = pick.choice(["Bcast", "Allgather", "Alltoall", "Gather", "Allgatherv", "Sendrecv"])
        match name:
            case "Bcast":
                self.call(name, [one, count, wide], 0)
            case "Gather":
                self.call(name, [one, count, wide], [whole, count, wide], 0)
            case "Allgather":
                sent = MPI.IN_PLACE if pick.random() < 0.4 else [one, count, wide]
                self.call(name, sent, [whole, count, wide])
            case "Allgatherv":
                counts = [pick.randint(0, count) for _ in range(comm.size)]
                starts = [count * rank for rank in range(comm.size)]
                sent = [one, counts[comm.rank], wide]
                sent = MPI.IN_PLACE if pick.random() < 0.4 else sent
                self.call(name, sent, [whole, counts, starts, wide])
            case "Alltoall":
                other = self.array(whole.size, dtype)
                sent = MPI.IN_PLACE if pick.random() < 0.4 else [other, count, wide]
                self.call(name, sent, [whole, count, wide])
            case _:
                right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
                comm.Sendrecv([one, count, wide], right, 1, [whole, count, wide], left, 1)
        for made in (wide, column):
            made.Free()
        self.see(one, whole)

    def unequal(self):
        comm, pick = self.comm, self.choose
        size, rank, root = comm.size, comm.rank, pick.randrange(comm.size)
        dtype, in_place = pick.choice(DTYPES), pick.random() < 0.4
        table = [[pick.choice((0, 0, 1, 2, 3)) for _ in range(size)] for _ in range(size)]
        gap = pick.choice((0, 0, 2))
        name = pick.choice(["Gatherv", "Scatterv", "Allgatherv", "Alltoallv", "Alltoallw"])
        datatype = MPI._typedict[np.dtype(dtype).char]
        counts = table[0]

        def blocks(counts):
            starts = [sum(counts[:at]) + gap * at for at in range(size)]
            data = self.array(sum(counts) + gap * size, dtype)
            return [data, counts, starts, datatype] if gap else [data, (counts, starts), datatype]

        one, whole = self.array(counts[rank], dtype), blocks(counts)
        own = None
        at_root = in_place and rank == root
        if name == "Gatherv":
            self.call(name, MPI.IN_PLACE if at_root else one, whole if rank == root else None, root)
        elif name == "Scatterv":
            self.call(name, whole if rank == root else None, MPI.IN_PLACE if at_root else one, root)
        elif name == "Allgatherv":
            self.call(name, MPI.IN_PLACE if in_place else one, whole)
        else:
            if in_place:  # both sides know how long a block is
                table = [[table[min(a, b)][max(a, b)] for b in range(size)] for a in range(size)]
            own = blocks(table[rank])
            whole = blocks([row[rank] for row in table])
            if name == "Alltoallw":
                width = np.dtype(dtype).itemsize
                own, whole = (self.by_bytes(one, width) for one in (own, whole))
            # Open MPI's nonblocking one mixes blocks up in place.
            self.call(name, MPI.IN_PLACE if in_place else own, whole, form="" if in_place else None)
        self.see(one, whole[0])

    @staticmethod
    def by_bytes(blocks, width):
        data, *_, datatype = blocks
        counts, starts = blocks[1:3] if len(blocks) == 4 else blocks[1]
        return [data, counts, [width * start for start in starts], [datatype] * len(counts)]

    def sums(self):
        comm, pick = self.comm, self.choose
        size, rank, root = comm.size, comm.rank, pick.randrange(comm.size)
        dtype, in_place, mine = pick.choice(DTYPES), pick.random() < 0.4, None
        ops = [MPI.SUM, MPI.PROD] + [MPI.MAX, MPI.MIN] * (dtype != "c16")
        ops += [MPI.BOR, MPI.BXOR, MPI.LAND] * (dtype in INTEGERS)
        op, count = pick.choice(ops), pick.randrange(4)
        if pick.random() < 0.25:
            op = mine = MPI.Op.Create(affine, commute=False)
            dtype, count = "i8", 2 * count
        name = pick.choice(SUMS)
        counts = [count * pick.randrange(3) for _ in range(size)]
        lengths = {"Reduce_scatter_block": count * size, "Reduce_scatter": sum(counts)}
        own = self.array(lengths.get(name, count), dtype)
        parts = {"Reduce_scatter_block": count, "Reduce_scatter": counts[rank]}
        total = own.copy() if in_place else self.array(parts.get(name, count), dtype)
        sent = own if name == "Reduce_scatter_block" else self.spec(own)
        sent = MPI.IN_PLACE if in_place else sent
        given = {"Reduce": (op, root), "Reduce_scatter": (counts, op)}.get(name, (op,))
        if name == "Reduce" and rank != root:
            sent, into = own, None
        else:
            into = total
        self.call(name, sent, into, *given, again=not in_place)
        known = {"Exscan": rank > 0, "Reduce": rank == root}.get(name, True)
        seen = parts.get(name, total.size)  # what lies behind a scattered result is anybody's
        self.found.append(total[:seen].tolist() if known else None)
        if mine:
            mine.Free()

    def pairs(self):
        own = np.zeros(3, np.dtype([("value", "f8"), ("place", "i4")], align=True))
        own["value"], own["place"] = self.array(3, "f8"), self.comm.rank
        total, op = own.copy(), self.choose.choice([MPI.MAXLOC, MPI.MINLOC])
        self.call("Allreduce", [own, 3, MPI.DOUBLE_INT], [total, 3, MPI.DOUBLE_INT], op, form="")
        self.found += total["value"].tolist() + total["place"].tolist()

    def objects(self):
        comm, pick = self.comm, self.choose
        root, own = pick.randrange(comm.size), (comm.rank, self.array(2, "i4").tolist())
        join = pick.choice([lambda a, b: a + b, MPI.SUM])
        self.found += [
            comm.bcast(own, root=root),
            comm.gather(own, root=root),
            comm.scatter([own] * comm.size if comm.rank == root else None, root=root),
            comm.allgather(own),
            comm.alltoall([(own, to) for to in range(comm.size)]),
            comm.allreduce(str(own), op=join),
            comm.reduce(str(own), op=join, root=root),
            comm.scan(str(own), op=join),
            comm.exscan(str(own), op=join),
            comm.allreduce((comm.rank % 2, comm.rank), op=MPI.MAXLOC),
        ]
        comm.barrier()

    def messages(self):
        """A ring of messages, by a drawn way of each side."""
        comm, pick = self.comm, self.choose
        comm.Barrier()  # messages of other steps come from any source, too
        size, rank, tag = comm.size, comm.rank, pick.randrange(5)
        step = pick.randrange(size)
        right, left = (rank + step) % size, (rank - step) % size
        dtype, count = pick.choice(DTYPES), pick.choice((0, 1, 5, 20_000))
        own, into = self.array(count, dtype), self.array(count + 2, dtype)
        source = pick.choice([left, MPI.ANY_SOURCE])
        any_tag = pick.choice([tag, MPI.ANY_TAG])
        way = pick.choice(MESSAGES)
        self.found.append(way)
        status = MPI.Status()
        match way:
            case "Isend" | "Issend":
                requests = [comm.Irecv(into, source, any_tag)]
                requests.append(getattr(comm, way)(self.spec(own), right, tag))
                status = self.complete(requests)[0]
            case "Sendrecv":
                comm.Sendrecv(own, right, tag, into, source, any_tag, status)
            case "Sendrecv_replace":
                comm.Sendrecv_replace(own, right, tag, source, any_tag, status)
                into = own
            case "init":
                requests = [comm.Recv_init(into, source, any_tag)]
                requests.append(comm.Send_init(own, right, tag))
                for _ in range(2):
                    MPI.Prequest.Startall(requests)
                    status = self.complete(requests)[0]
                for request in requests:
                    request.Free()
            case "Probe" | "Mprobe" | "Improbe":
                send = comm.Isend(own, right, tag)
                if way == "Probe":
                    comm.Probe(source, any_tag, status)
                    self.found.append(told(status))
                    comm.Recv(into, status.source, status.tag, status)
                else:
                    while not (message := getattr(comm, way)(source, any_tag, status)):
                        pass
                    self.found.append(told(status))
                    message.Recv(into, status)
                send.Wait()
            case "objects":
                requests = [comm.irecv(None, source, any_tag)]
                requests.append(comm.isend((rank, own[:3].tolist()), right, tag))
                status = self.complete(requests)[0]
                requests = [comm.irecv(None, source, any_tag), comm.isend(rank, right, tag)]
                self.found.append(MPI.Request.waitall(requests))
            case "sendrecv":
                self.found.append(
                    comm.sendrecv((rank, 1), right, tag, None, source, any_tag, status)
                )
            case "ends":
                up = rank + 1 if rank + 1 < size else MPI.PROC_NULL
                down = rank - 1 if rank else MPI.PROC_NULL
                comm.Sendrecv(own, up, tag, into, down, tag, status)
            case _:  # a collective that ends only with a message, and the other way round
                total, root = np.zeros(3), pick.randrange(size)
                begun = comm.Ibcast(own, root)
                if rank == root:
                    for peer in range(size):
                        if peer != root:
                            comm.Recv(into[:0], peer, tag)
                else:
                    begun.Wait()
                    comm.Send(into[:0], root, tag)
                later = comm.Iallreduce(np.full(3, 1.0 * rank), total)
                self.complete([one for one in (begun, comm.Ibarrier(), later) if one])
                self.see(own, total)
        comm.Barrier()
        cut = slice(None) if way != "ends" or rank else slice(0)
        self.see(into[cut])
        if way in ("objects", "sendrecv"):
            self.found.append(told(status)[:2])
        elif way != "mixed":
            self.found.append(told(status))

    def cancelled(self):
        """A receive that nothing meets; and a request of nothing."""
        status = MPI.Status()
        request = self.comm.Irecv(np.zeros(1), self.comm.rank, 77)
        request.Cancel()
        request.Wait(status)
        self.found.append(status.cancelled)
        status.source = 3
        MPI.REQUEST_NULL.Wait(status)
        self.found += [told(status), MPI.Request.Waitany([]), MPI.Request.Waitsome([])]

    def place(self):
        """Where a rank is in a grid or graph, and what its neighbours give it."""
        comm, pick = self.comm, self.choose
        self.found += [comm.rank, comm.size, comm.is_topo]
        self.found.append(
            comm.Get_group().Translate_ranks(range(comm.size), MPI.COMM_WORLD.Get_group())
        )
        if not comm.is_topo:
            return
        if isinstance(comm, MPI.Cartcomm):
            self.found += [comm.topo, comm.dim, comm.dims, comm.periods, comm.coords]
            self.found += [comm.Get_coords(rank) for rank in range(comm.size)]
            for along in range(comm.ndim):
                step = pick.randrange(-3, 4)
                self.found.append(comm.Shift(along, step))
                at = [*comm.coords]
                at[along] += step * comm.dims[along] if comm.periods[along] else 0
                self.found.append(comm.Get_cart_rank(at))
        elif isinstance(comm, MPI.Graphcomm):
            self.found += [comm.topo, comm.dims, comm.neighbors, comm.nneighbors]
            self.found += [comm.index, comm.edges, comm.nnodes, comm.nedges]
        else:
            self.found += [comm.Get_dist_neighbors_count(), comm.Get_dist_neighbors()]
        sources, targets = comm.inoutedges
        self.found += [sources, targets, comm.degrees]
        dtype, count = pick.choice(DTYPES), pick.randint(1, 3)
        datatype = MPI._typedict[np.dtype(dtype).char]
        some = min(min(each) for each in comm.allgather(comm.degrees))
        equal = ("allgather", "alltoall") if some else ()  # mpi4py knows no length of nothing
        name = pick.choice([*equal, "allgatherv", "alltoallv", "alltoallw"])
        own = self.array(count * (1 if name.startswith("allgather") else len(targets)), dtype)
        into = self.array(count * len(sources), dtype)
        sent, received = own, into
        if name.endswith("v"):
            received = [into, [count] * len(sources), datatype]
            if name == "alltoallv":
                sent = [own, [count] * len(targets), datatype]
        if name.endswith("w"):
            width = count * np.dtype(dtype).itemsize
            sent, received = (
                [data, [count] * n, [width * at for at in range(n)], [datatype] * n]
                for data, n in ((own, len(targets)), (into, len(sources)))
            )
        rings = zip(comm.dims, comm.periods, strict=True) if isinstance(comm, MPI.Cartcomm) else ()
        # Open MPI's nonblocking ones take one side of a short ring for the other.
        form = "" if any(ring and length < 3 for length, ring in rings) else None
        self.call(f"Neighbor_{name}", sent, received, form=form)
        self.found.append(into.tolist())
        self.found.append(comm.neighbor_allgather(comm.rank))
        self.found.append(comm.neighbor_alltoall([(comm.rank, to) for to in targets]))

    def run(self):
        for _ in range(4):
            kind = self.choose.choice(KINDS)
            self.found.append(kind)
            if self.comm is None:
                break
            getattr(self, kind)()


def affine(left, right, _):
    """Composes maps ``x -> a x + b``: it does not commute."""
    one, both = np.frombuffer(left, "i8").reshape(-1, 2), np.frombuffer(right, "i8").reshape(-1, 2)
    both[:, 1] = one[:, 0] * both[:, 1] + one[:, 1]
    both[:, 0] *= one[:, 0]


def main(folder, first, last):
    world = MPI.COMM_WORLD
    with Path(folder, str(world.rank)).open("w") as file:
        for seed in range(int(first), int(last)):
            drawn = Drawn(seed)
            try:
                drawn.run()
            except Exception:
                print(seed, drawn.found, file=file)
                print(traceback.format_exc(), file=file, flush=True)
                world.Abort(1)
            print(seed, drawn.found, file=file, flush=True)
            world.Barrier()


main(*sys.argv[1:])
