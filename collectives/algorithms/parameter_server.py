"""Parameter server: workers push to servers, which reduce and give the result back.

Server s is rank s and owns chunk s; every rank is a worker too.  Li et al.: "Scaling distributed
machine learning with the parameter server", OSDI 2014.
"""

from collections.abc import Iterator

from collectives.schedule import Recv, RecvReduce, Round, Send, Step, recvbuf, sendbuf


def allreduce(rank: int, size: int, servers: int = 1) -> Iterator[Round]:
    """Push and pull, one worker at a time at each server.

    With one server it keeps rank order, and its link carries everything: 2(p-1) rounds of the whole
    buffer.  ``servers`` of them divide that by as many.  Rodriguez's T_PS = 2(L + T') assumes
    p-1 ports at the server.
    """
    for distance in range(1, size):
        worker, server = (rank + distance) % size, (rank - distance) % size
        push: list[Step] = []
        if server < servers:
            push.append(Send(server, sendbuf[server]))
        if rank < servers:
            own = sendbuf[rank] if distance == 1 else recvbuf[rank]
            push.append(RecvReduce(worker, recvbuf[rank], own))
        yield tuple(push)
    for distance in range(1, size):
        worker, server = (rank + distance) % size, (rank - distance) % size
        pull: list[Step] = []
        if rank < servers:
            pull.append(Send(worker, recvbuf[rank]))
        if server < servers:
            pull.append(Recv(server, recvbuf[server]))
        yield tuple(pull)
