"""A group of ``torch.distributed`` whose calls do nothing, so that torch's own time is left."""

from typing import Any

import torch.distributed as dist

from collectives.torch.order import DoneWork

#: Name of the backend in ``new_group``, once :func:`register` was called.
NAME = "idle"
_ProcessGroup: Any = dist.ProcessGroup
_DONE = DoneWork()


class IdleGroup(_ProcessGroup):
    """Each call returns a work that is done, and leaves its tensors as they are."""

    def _nothing(self, *_: Any, **__: Any) -> dist._Work:
        return _DONE

    allreduce = broadcast = reduce = all_gather_single = reduce_scatter_single = _nothing
    _allgather_base = _reduce_scatter_base = alltoall_base = all_to_all_single = _nothing
    barrier = _nothing


def register() -> None:
    """Lets ``dist.new_group(backend=NAME)`` make such groups."""

    def create(options: Any, _: Any) -> IdleGroup:
        return IdleGroup(options.group_rank, options.group_size)

    dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu"])
