"""Replicas of a module, compared."""

import hashlib

import torch
import torch.distributed as dist


def check_replicas(module: torch.nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Compares the parameters of all ranks of a group, bit by bit; collective.

    Each rank computes a digest of each parameter, and the ranks gather the digests: 16 bytes and
    the name of each.

    Args:
        module: a module whose parameters are whole on each rank, as DistributedDataParallel has it.
        group: a group of any backend; all ranks by default.

    Raises:
        RuntimeError: on all ranks: parameters differ, in name, type, shape or value.
    """
    own = {}
    for name, parameter in module.named_parameters():
        values = parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        digest = hashlib.blake2b(values.tobytes(), digest_size=16).digest()
        own[name] = str(parameter.dtype), tuple(parameter.shape), digest
    every: list[dict[str, object]] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(every, own, group)
    for name in {name: None for found in every for name in found}:
        others = [r for r, found in enumerate(every) if found.get(name) != every[0].get(name)]
        if others:
            raise RuntimeError(
                f"{name} is another on ranks {others} of the group than on rank 0: seeds, data or "
                "updates differ; begin with rank 0's values, as DistributedDataParallel does"
            )
