"""Results that collectives must give."""

import numpy as np


def lengths(schedule, count):
    """For each rank, how many items it sends and receives in blocks of ``count``."""
    blocks = schedule.contract
    members = [schedule.member(rank)._replace(chunks=1) for rank in range(schedule.size)]
    return [(count * blocks.send_blocks(m), count * blocks.recv_blocks(m)) for m in members]


def reference(collective, inputs, rank, root=0):
    """Items that ``rank`` must receive, computed without any schedule; ``None``: nothing."""
    size = len(inputs)
    if rank != root and collective in ("reduce", "gather"):
        return None

    def total(ranks):
        wide = np.complex128 if inputs[0].dtype.kind == "c" else np.float64
        return np.sum(np.stack(ranks).astype(wide), axis=0)

    def to_rank(sender):
        return np.split(inputs[sender], size)[rank]

    match collective:
        case "allreduce" | "reduce":
            return total(inputs)
        case "reduce_scatter":
            return total([to_rank(sender) for sender in range(size)])
        case "scan":
            return total(inputs[: rank + 1])
        case "exscan":
            return total(inputs[:rank]) if rank else None
        case "broadcast":
            return inputs[root]
        case "scatter":
            return to_rank(root)
        case "allgather" | "gather":
            return np.concatenate(inputs)
        case "alltoall":
            return np.concatenate([to_rank(sender) for sender in range(size)])
