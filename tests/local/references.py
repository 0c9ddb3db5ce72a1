"""What collectives must give."""

import numpy as np


def reference(schedule, inputs, rank):
    """What ``rank`` must receive, computed without any schedule; ``None``: nothing."""
    size, root, collective = schedule.size, schedule.root, schedule.collective
    if rank != root and collective in ("reduce", "gather"):
        return None
    match collective:
        case "allreduce" | "reduce":
            return np.sum(np.stack(inputs).astype(np.float64), axis=0)
        case "reduce_scatter":
            return np.sum(np.stack(inputs).astype(np.float64), axis=0).reshape(size, -1)[rank]
        case "scan":
            return np.sum(np.stack(inputs[: rank + 1]).astype(np.float64), axis=0)
        case "exscan":
            return np.sum(np.stack(inputs[:rank]).astype(np.float64), axis=0) if rank else None
        case "broadcast":
            return inputs[root]
        case "scatter":
            return inputs[root].reshape(size, -1)[rank]
        case "allgather" | "gather":
            return np.concatenate(inputs)
        case "alltoall":
            return np.concatenate([items.reshape(size, -1)[rank] for items in inputs])
