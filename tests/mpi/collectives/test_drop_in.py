"""Each method and attribute of ``MPI.Intracomm``, on ours and on mpi4py's own."""

import numpy as np
import pytest
from mpi4py import MPI

from collectives import Communicator
from collectives.calls.native import library

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.quick_on(2)]

COUNT = 3


def mine(comm, blocks=1):
    return np.arange(COUNT * blocks, dtype=float) + 10 * comm.rank


def ended(made):
    """The result of a call, once it has ended."""
    if isinstance(made, tuple) and isinstance(made[-1], MPI.Request):  # Idup
        made[1].Wait()
        return made[0]
    if made is not None and hasattr(made, "Wait"):
        if isinstance(made, MPI.Prequest):
            persistent(made)
        else:
            made.Wait()
    return None if hasattr(made, "Wait") else made


def persistent(plan):
    plan.Start()
    plan.Wait()
    plan.Free()


def collective(name, given):
    """The method in its three forms; ``given`` makes its arguments, and what is looked at then."""

    def form(method, end):
        def call(comm):
            arguments, found = given(comm)
            end(getattr(comm, method)(*arguments))
            return found

        return call

    return {
        name: form(name, ended),
        f"I{name.lower()}": form(f"I{name.lower()}", ended),
        f"{name}_init": form(f"{name}_init", persistent),
    }


def out(comm, send, blocks=1, *rest):
    found = np.zeros(COUNT * blocks)
    return (send, found, *rest), found


def crossed(comm):
    """For ``Alltoallw``: bytes, counts, displacements and types of each block."""
    found, size = np.zeros(COUNT * comm.size), comm.size
    blocks = [COUNT] * size, [8 * COUNT * rank for rank in range(size)], [MPI.DOUBLE] * size
    return ([mine(comm, size), *blocks], [found, *blocks]), found


COLLECTIVES = {
    "Allreduce": lambda c: out(c, mine(c), 1, MPI.SUM),
    "Reduce": lambda c: out(c, mine(c), 1, MPI.MAX, 1),
    "Scan": lambda c: out(c, mine(c)),
    "Exscan": lambda c: out(c, mine(c)),
    "Reduce_scatter": lambda c: out(c, mine(c, c.size), 1, [COUNT] * c.size),
    "Reduce_scatter_block": lambda c: out(c, mine(c, c.size)),
    "Allgather": lambda c: out(c, mine(c), c.size),
    "Allgatherv": lambda c: out(c, mine(c), c.size),
    "Gather": lambda c: out(c, mine(c), c.size, 1),
    "Gatherv": lambda c: out(c, mine(c), c.size, 1),
    "Scatter": lambda c: out(c, mine(c, c.size), 1, 1),
    "Scatterv": lambda c: out(c, mine(c, c.size), 1, 1),
    "Alltoall": lambda c: out(c, mine(c, c.size), c.size),
    "Alltoallv": lambda c: out(c, mine(c, c.size), c.size),
    "Alltoallw": crossed,
    "Bcast": lambda c: ((buffer := mine(c), 1), buffer),
    "Barrier": lambda c: ((), None),
}


def around(comm):
    return (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size


def sent(method):
    """A message around the ring by this send."""

    def call(comm):
        right, left = around(comm)
        found = np.zeros(COUNT)
        receive = comm.Irecv(found, left, 7)
        comm.Barrier()
        MPI.Attach_buffer(np.zeros(10_000, np.uint8)) if "bsend" in method.lower() else None
        ended(getattr(comm, method)(mine(comm), right, 7))
        receive.Wait()
        MPI.Detach_buffer() if "bsend" in method.lower() else None
        return found

    return call


def received(take):
    """A message around the ring, taken by this function of communicator, source and buffer."""

    def call(comm):
        right, left = around(comm)
        request, found = comm.Isend(mine(comm), right, 7), np.zeros(COUNT)
        result = take(comm, left, found)
        request.Wait()
        return [found, result]

    return call


def objects(take, send="isend"):
    """An object around the ring."""

    def call(comm):
        right, left = around(comm)
        MPI.Attach_buffer(np.zeros(10_000, np.uint8)) if "bsend" in send else None
        receive = comm.irecv(source=left, tag=9) if take is None else None
        request = getattr(comm, send)(["an", "object", comm.rank], right, 9)
        found = receive.wait() if take is None else take(comm, left)
        if request is not None:
            request.wait()
        MPI.Detach_buffer() if "bsend" in send else None
        return found

    return call


def polled(probe):
    """The result of a probe that does not wait, asked until it has one."""
    while not (found := probe()):
        pass
    return found


def _taken(comm, left, found, message):
    message.Recv(found)


POINT_TO_POINT = {
    **{
        name: sent(name)
        for base in ("Send", "Bsend", "Ssend", "Rsend")
        for name in (base, f"I{base.lower()}", f"{base}_init")
    },
    "Recv": received(lambda c, left, found: c.Recv(found, left, 7)),
    "Irecv": received(lambda c, left, found: ended(c.Irecv(found, left, 7))),
    "Recv_init": received(lambda c, left, found: ended(c.Recv_init(found, left, 7))),
    "Probe": received(lambda c, left, found: (c.Probe(left, 7), c.Recv(found, left, 7))),
    "Iprobe": received(
        lambda c, left, found: (polled(lambda: c.Iprobe(left, 7)), c.Recv(found, left, 7))
    ),
    "Mprobe": received(lambda c, left, found: c.Mprobe(left, 7).Recv(found)),
    "Improbe": received(lambda c, left, found: polled(lambda: c.Improbe(left, 7)).Recv(found)),
    "send": lambda c: objects(None, "send")(c),
    "bsend": objects(None, "bsend"),
    "ssend": objects(None, "ssend"),
    "isend": objects(None, "isend"),
    "ibsend": objects(None, "ibsend"),
    "issend": objects(None, "issend"),
    "recv": objects(lambda c, left: c.recv(source=left, tag=9)),
    "irecv": objects(None),
    "probe": objects(lambda c, left: (c.probe(left, 9), c.recv(source=left, tag=9))),
    "iprobe": objects(
        lambda c, left: (polled(lambda: c.iprobe(left, 9)), c.recv(source=left, tag=9))
    ),
    "mprobe": objects(lambda c, left: c.mprobe(left, 9).recv()),
    "improbe": objects(lambda c, left: polled(lambda: c.improbe(left, 9)).recv()),
    "sendrecv": lambda c: c.sendrecv(c.rank, around(c)[0], source=around(c)[1]),
    "Sendrecv": lambda c: (
        c.Sendrecv(mine(c), around(c)[0], recvbuf=(found := np.zeros(COUNT))),
        found,
    ),
    "Sendrecv_replace": lambda c: (
        c.Sendrecv_replace(found := mine(c), around(c)[0], source=around(c)[1]),
        found,
    ),
    "Isendrecv": lambda c: (
        ended(c.Isendrecv(mine(c), around(c)[0], recvbuf=(found := np.zeros(COUNT)))),
        found,
    ),
    "Isendrecv_replace": lambda c: (
        ended(c.Isendrecv_replace(found := mine(c), around(c)[0], source=around(c)[1])),
        found,
    ),
}
OF_OBJECTS = {
    "allgather": lambda c: c.allgather((c.rank, "x")),
    "allreduce": lambda c: c.allreduce([c.rank]),
    "alltoall": lambda c: c.alltoall([c.rank * 10 + to for to in range(c.size)]),
    "barrier": lambda c: c.barrier(),
    "bcast": lambda c: c.bcast({"from": c.rank}, 1),
    "exscan": lambda c: c.exscan(c.rank + 1),
    "gather": lambda c: c.gather(c.rank, 1),
    "reduce": lambda c: c.reduce(c.rank, MPI.MAX, 1),
    "scan": lambda c: c.scan(c.rank + 1),
    "scatter": lambda c: c.scatter([*range(c.size)] if c.rank == 1 else None, 1),
}


def neighbours(comm):
    return [around(comm)[1]], [around(comm)[0]]


COMMUNICATORS = {
    "Clone": lambda c: c.Clone(),
    "Dup": lambda c: c.Dup(),
    "Dup_with_info": lambda c: c.Dup_with_info(MPI.INFO_NULL),
    "Idup": lambda c: ended(c.Idup()),
    "Idup_with_info": lambda c: ended(c.Idup_with_info(MPI.INFO_NULL)),
    "Create": lambda c: c.Create(c.group),
    "Create_group": lambda c: c.Create_group(c.group),
    "Split": lambda c: c.Split(0, -c.rank),
    "Split_type": lambda c: c.Split_type(MPI.COMM_TYPE_SHARED),
    "Create_cart": lambda c: c.Create_cart([c.size]),
    "Create_graph": lambda c: c.Create_graph([*range(1, c.size + 1)], [*range(c.size)]),
    "Create_dist_graph": lambda c: c.Create_dist_graph([c.rank], [1], [around(c)[0]]),
    "Create_dist_graph_adjacent": lambda c: c.Create_dist_graph_adjacent(*neighbours(c)),
    "Shrink": lambda c: c.Shrink(),
    "fromhandle": lambda c: type(c).fromhandle(c.Dup().handle),
    "f2py": lambda c: type(c).f2py(c.Dup().py2f()),
    "fromint": lambda c: type(c).fromint(c.Dup().toint()),
}
#: mpi4py's own come of these.
OTHERS = {
    "Create_intercomm": lambda c: c.Split(c.rank % 2, c.rank).Create_intercomm(
        0, c, 1 - c.rank % 2
    ),
    "Create_from_group": lambda c: type(c).Create_from_group(c.group),
    "Ishrink": lambda c: ended(c.Ishrink()),
    "Get_parent": lambda c: type(c).Get_parent(),
}


def attribute(comm):
    key = type(comm).Create_keyval()
    comm.Set_attr(key, [comm.rank])
    found = comm.Get_attr(key)
    comm.Delete_attr(key)
    return found, comm.Get_attr(key), type(comm).Free_keyval(key) == MPI.KEYVAL_INVALID


def named(comm):
    made = comm.Dup()
    made.Set_name("ours")
    before, made.name = made.Get_name(), "again"
    return before, made.name


def handled(comm):
    handler = comm.Get_errhandler()
    comm.Set_errhandler(MPI.ERRORS_RETURN)
    comm.Set_errhandler(handler)
    return comm.Get_errhandler() == handler


def with_info(comm):
    comm.Set_info(MPI.INFO_NULL if library().startswith("Intel") else MPI.Info.Create({"a": "b"}))
    return type(comm.Get_info()), type(comm.info)


def buffered(comm):
    comm.Attach_buffer(np.zeros(1000, np.uint8))
    comm.Flush_buffer()
    ended(comm.Iflush_buffer())
    return comm.Detach_buffer() is not None


def freed(method):
    def call(comm):
        made = comm.Dup()
        getattr(made, method)()
        return made == MPI.COMM_NULL

    return call


def unreachable(comm):
    comm.Call_errhandler(MPI.ERR_OTHER)


PROPERTIES = {
    **{
        name: (lambda c, name=name: getattr(c, name))
        for name in ("rank", "size", "is_inter", "is_intra", "is_topo", "topology")
    },
    **{
        name: (lambda c, name=name: getattr(c, name)())
        for name in ("Get_rank", "Get_size", "Get_topology", "Is_inter", "Is_intra", "Is_revoked")
    },
    "group": lambda c: MPI.Group.Compare(c.group, MPI.COMM_WORLD.group),
    "Get_group": lambda c: MPI.Group.Compare(c.Get_group(), MPI.COMM_WORLD.group),
    "handle": lambda c: type(c.handle),
    "toint": lambda c: type(c.toint()),
    "py2f": lambda c: type(c.py2f()),
    "Compare": lambda c: (
        type(c).Compare(c, c),
        type(c).Compare(c, c.Dup()),
        c == type(c).fromhandle(c.handle),
    ),
    **dict.fromkeys(
        ("Create_keyval", "Set_attr", "Get_attr", "Delete_attr", "Free_keyval"), attribute
    ),
    **dict.fromkeys(("name", "Get_name", "Set_name"), named),
    **dict.fromkeys(("Get_errhandler", "Set_errhandler"), handled),
    **dict.fromkeys(("Get_info", "Set_info", "info"), with_info),
    **dict.fromkeys(("Attach_buffer", "Detach_buffer", "Flush_buffer", "Iflush_buffer"), buffered),
    "Create_errhandler": lambda c: type(c).Create_errhandler(lambda comm, code: None) is not None,
    "Call_errhandler": unreachable,
    "Cart_map": lambda c: c.Cart_map([c.size], [False]),
    "Graph_map": lambda c: c.Graph_map([*range(1, c.size + 1)], [*range(c.size)]),
    "Agree": lambda c: c.Agree(5),
    "Iagree": lambda c: ended(c.Iagree(np.array([5], np.intc))),
    "Ack_failed": lambda c: c.Ack_failed(),
    "Get_failed": lambda c: c.Get_failed().size,
    **{name: freed(name) for name in ("Free", "free", "Disconnect")},
}
#: Methods that end the job, need another one, spoil the communicator, or are half a message.
APART = {
    *("Abort", "Accept", "Connect", "Join", "Revoke", "Spawn", "Spawn_multiple"),
    *("Psend_init", "Precv_init"),
}
TABLE = {
    **{n: f for name, given in COLLECTIVES.items() for n, f in collective(name, given).items()},
    **POINT_TO_POINT,
    **OF_OBJECTS,
    **COMMUNICATORS,
    **OTHERS,
    **PROPERTIES,
}


def as_it_is(found):
    """A result in a form that can be compared."""
    if isinstance(found, np.ndarray):
        return found.tolist()
    if isinstance(found, tuple | list):
        return [as_it_is(one) for one in found]
    if isinstance(found, MPI.Comm):
        if found == MPI.COMM_NULL:
            return "none"
        kinds = (MPI.Cartcomm, MPI.Graphcomm, MPI.Distgraphcomm, MPI.Intercomm, MPI.Intracomm)
        kind = next(kind.__name__ for kind in kinds if isinstance(found, kind))
        return kind, found.size, found.rank, found.topology, as_it_is(found.Get_info() is not None)
    return found


def tried(comm, name):
    try:
        return as_it_is(TABLE[name](comm))
    except (MPI.Exception, NotImplementedError, TypeError, ValueError) as error:
        return type(error)


def test_no_method_is_left_out():
    names = {name for name in dir(MPI.Intracomm) if not name.startswith("__")}
    assert names - set(TABLE) == APART


@pytest.fixture(scope="module")
def plain():
    made = MPI.COMM_WORLD.Dup()
    yield made
    made.Free()


@pytest.fixture(scope="module")
def strict():
    with Communicator(MPI.COMM_WORLD, algorithm="ring", check=True) as made:
        yield made


@pytest.mark.parametrize("name", TABLE)
def test_it_does_what_mpi4pys_does(comm, plain, name):
    expected = tried(plain, name)
    if expected is NotImplementedError:
        pytest.skip("this MPI has none, whatever ours does")
    assert tried(comm, name) == expected


@pytest.mark.parametrize("name", [*COMMUNICATORS, *OTHERS])
def test_what_is_made_of_ours_is_ours_or_mpi4pys(strict, name):
    comm = strict
    try:
        made = TABLE[name](comm)
    except (MPI.Exception, NotImplementedError):
        pytest.skip("this MPI has none")
    assert isinstance(made, Communicator) == (name in COMMUNICATORS)
    if name in COMMUNICATORS:
        handed_on = name not in ("fromhandle", "f2py", "fromint")
        assert not handed_on or made._engine.settings == comm._engine.resources.handed_on
        made.Allreduce(MPI.IN_PLACE, items := np.ones(3), algorithm="ring")
        assert (items == made.size).all()
        made.Free()
