"""What collectives must give."""

import numpy as np


def reference(collective, inputs, rank, root=0):
    """What ``rank`` must receive, computed without any schedule; ``None``: nothing."""
    size = len(inputs)
    if rank != root and collective in ("reduce", "gather"):
        return None

    def total(ranks):
        wide = np.complex128 if inputs[0].dtype.kind == "c" else np.float64
        return np.sum(np.stack(ranks).astype(wide), axis=0)

    match collective:
        case "allreduce" | "reduce":
            return total(inputs)
        case "reduce_scatter":
            return total(inputs).reshape(size, -1)[rank]
        case "scan":
            return total(inputs[: rank + 1])
        case "exscan":
            return total(inputs[:rank]) if rank else None
        case "broadcast":
            return inputs[root]
        case "scatter":
            return inputs[root].reshape(size, -1)[rank]
        case "allgather" | "gather":
            return np.concatenate(inputs)
        case "alltoall":
            return np.concatenate([items.reshape(size, -1)[rank] for items in inputs])
