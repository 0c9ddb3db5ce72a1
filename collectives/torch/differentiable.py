"""Collectives with gradients that torch itself lacks: blocks of unequal size, and messages.

``torch.distributed.nn.functional`` and ``torch.distributed._functional_collectives`` have the other
ones.  The gradients are those of the sum of all ranks' losses, and all ranks go backward through
the same calls.  Under ``torch.no_grad`` they only communicate.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist

#: Gradients have tags of their own above all tags of values, as both may go between two ranks.
_GRADIENTS = 1 << 14


def all_gather(tensor: torch.Tensor, group: Any = None) -> tuple[torch.Tensor, ...]:
    """All ranks' tensors, which may differ in their first axis; collective.

    Backward, a rank gets the sum of all ranks' gradients of its tensor, by a reduce-scatter.

    Args:
        tensor: shape (rows, ...), another number of rows on each rank.
        group: torch's group of this backend; ``None`` for all ranks.

    Returns:
        A tensor of each rank, in the order of the ranks.

    Cost: an all-gather of the numbers of rows, and one of the tensors.
    """
    rows = [torch.tensor(0) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, torch.tensor(tensor.shape[0]), group)
    found = _AllGather.apply(group, [int(number) for number in rows], tensor)
    return cast(tuple[torch.Tensor, ...], found)


def reduce_scatter(blocks: Sequence[torch.Tensor], group: Any = None) -> torch.Tensor:
    """The sum over the ranks of this rank's block; blocks may be unequal; collective.

    Backward, each rank gets the gradients of all blocks, by an all-gather.

    Args:
        blocks: a block for each rank, with the same shapes on all ranks.
        group: torch's group of this backend; ``None`` for all ranks.

    Returns:
        A tensor of the shape of this rank's block.
    """
    return cast(torch.Tensor, _ReduceScatter.apply(group, *blocks))


def send(tensor: torch.Tensor, to: int, group: Any = None, tag: int = 0) -> torch.Tensor:
    """Sends a tensor to a rank, which calls :func:`recv`; it is free again at once.

    Backward, this rank waits for the gradient of the tensor.

    Args:
        tensor: any dense tensor on the CPU.
        to: global rank of the receiver, as in ``torch.distributed.send``.
        group: torch's group; ``None`` for all ranks.
        tag: number of the message, below 16384.

    Returns:
        A zero of no dimension.  Add it to the loss, so that ``backward`` comes to the message:
        else the gradient is lost, and this rank's leaves before it have none.

    Raises:
        ValueError: the tag is too large.
    """
    return cast(torch.Tensor, _Send.apply(to, group, _checked(tag), tensor, _leaf()))


def recv(like: torch.Tensor, source: int, group: Any = None, tag: int = 0) -> torch.Tensor:
    """Receives a tensor from a rank that calls :func:`send`.

    Backward, its gradient goes to that rank, whether a loss depends on the tensor or not, if
    ``backward`` comes to it.  Both ranks either call these within ``torch.no_grad`` or do not, and
    go backward once for each message.

    Args:
        like: a tensor of the same shape and dtype; its values are not looked at.
        source: global rank of the sender, as in ``torch.distributed.recv``.
        group: torch's group; ``None`` for all ranks.
        tag: number of the message, below 16384.

    Returns:
        The tensor, which needs a gradient.

    Raises:
        ValueError: the tag is too large.
    """
    return cast(torch.Tensor, _Recv.apply(source, group, _checked(tag), like.detach(), _leaf()))


def _checked(tag: int) -> int:
    if not 0 <= tag < _GRADIENTS:
        raise ValueError(
            f"tag={tag} must be from 0 to {_GRADIENTS - 1}; larger ones are gradients'"
        )
    return tag


def _leaf() -> torch.Tensor:
    """A tensor that needs a gradient, so that what is made of it does."""
    return torch.empty(0, requires_grad=True)


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Any, rows: list[int], tensor: torch.Tensor) -> Any:
        ctx.group = group
        found = tuple(tensor.new_empty((number, *tensor.shape[1:])) for number in rows)
        dist.all_gather(list(found), tensor.contiguous(), group)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return None, None, _ReduceScatter.apply(ctx.group, *gradients)


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Any, *blocks: torch.Tensor) -> torch.Tensor:
        ctx.group, ctx.shapes = group, [block.shape for block in blocks]
        found = blocks[0].new_empty(ctx.shapes[dist.get_rank(group)])
        dist.reduce_scatter(found, [block.contiguous() for block in blocks], group=group)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        rows = [shape.numel() for shape in ctx.shapes]
        parts = _AllGather.apply(ctx.group, rows, gradient.reshape(-1))
        return None, *(part.view(shape) for part, shape in zip(parts, ctx.shapes, strict=True))


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, to: int, group: Any, tag: int, tensor: torch.Tensor, _: torch.Tensor
    ) -> torch.Tensor:
        ctx.message, ctx.shape = (to, group, tag + _GRADIENTS), tensor.shape
        # A copy, as the program may change the tensor while it is under way.
        dist.isend(tensor.detach().clone(memory_format=torch.contiguous_format), to, group, tag)
        return tensor.new_zeros(())

    @staticmethod
    def backward(ctx: Any, zero: torch.Tensor) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError("send() has no gradient of its gradient: create_graph=False")
        gradient = zero.new_empty(ctx.shape)
        dist.recv(gradient, *ctx.message)
        return None, None, None, gradient, None


class _Recv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, source: int, group: Any, tag: int, like: torch.Tensor, _: torch.Tensor
    ) -> torch.Tensor:
        ctx.message = source, group, tag + _GRADIENTS
        found = like.new_empty(like.shape)
        dist.recv(found, source, group, tag)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        # Autograd goes backward in the opposite order of the forward calls: it comes to each
        # message's receiver first, which does not wait.
        dist.isend(gradient.contiguous(), *ctx.message)
        return None, None, None, None, None
