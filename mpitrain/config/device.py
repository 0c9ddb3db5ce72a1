"""What a job asks for that only the CPU does."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpitrain.config.tables import Config


def cpu_alone(job: "Config") -> str:
    """Why a job computes on the CPU alone, as "key: sentence"; nothing of one that need not."""
    p = job.parallel
    for place, is_set, why in (
        ("parallel.offload", p.offload, "files are mapped into memory of the host"),
        ("parallel.node_shared", p.node_shared, "GPUs have memory of their own; zero = 1 shares"),
        ("compress.codec", job.compress.codec != "none", "codes are made on the host"),
        ("sync.kind", job.sync.kind != "every_step", "workers exchange on the host"),
        ("sync.combine", job.sync.combine != "mean", "adasum is made on the host"),
        ("server", job.server.ranks or job.server.hogwild, "servers keep parameters on the host"),
        ("federated.clients", job.federated.clients, "clients sum on the host"),
    ):
        if is_set:
            return f"{place}: {why}"
    return ""
