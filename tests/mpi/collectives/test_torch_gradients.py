"""Gradients of collectives of torch tensors: those of one process that has all ranks' tensors."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as nn

from tests.mpi.collectives.forms import LAST, RANK, P

pytestmark = [
    pytest.mark.quick_on(3),
    pytest.mark.at_most(4),
    pytest.mark.usefixtures("world"),
    pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning"),
]
EQUAL = [(2 * P, 3)] * P
#: Rows of the block that each rank sends to rank r.
ROWS = [r + 1 for r in range(P)]
FOR_BLOCKS = [(sum(ROWS), 3)] * P


def drawn(seed, shape):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def loss(rank, outputs):
    """A rank's loss, which weighs each number of each output differently."""
    terms = (drawn(1000 + 10 * rank + i, out.shape) * out**2 for i, out in enumerate(outputs))
    return sum(term.sum() for term in terms)


def blocks(x, sizes=None):
    return list(x.split(sizes)) if sizes else list(x.chunk(P))


def exchanged(xs, sizes=None):
    """The blocks that each rank gets in an all-to-all."""
    return [[blocks(x, sizes)[r] for x in xs] for r in range(P)]


def only_on_last(r, outputs):
    return outputs if r == LAST else [0 * out for out in outputs]


def room(rows):
    return torch.empty(rows, 3, dtype=torch.float64)


MEAN = lambda xs: [[sum(xs) / P]] * P  # noqa: E731
#: What this rank calls on its tensor, all ranks' results by one process, and the ranks' shapes.
CALLS = {
    "nn.all_reduce, mean": (lambda x: [nn.all_reduce(x * 1, dist.ReduceOp.AVG)], MEAN, EQUAL),
    "nn.all_to_all, unequal": (
        lambda x: nn.all_to_all([room(ROWS[RANK]) for _ in range(P)], blocks(x, ROWS)),
        lambda xs: exchanged(xs, ROWS), FOR_BLOCKS),
    "nn.reduce": (
        lambda x: only_on_last(RANK, [nn.reduce(x * 1, LAST)]),
        lambda xs: [only_on_last(r, [sum(xs)]) for r in range(P)], EQUAL),
    "nn.gather": (
        lambda x: only_on_last(RANK, nn.gather(x, LAST)),
        lambda xs: [only_on_last(r, list(xs)) for r in range(P)], EQUAL),
    "nn.scatter": (
        lambda x: [nn.scatter(blocks(x), LAST)],
        lambda xs: [[blocks(xs[LAST])[r]] for r in range(P)], EQUAL),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_gradients_are_those_of_one_process(name):
    call, alone, shapes = CALLS[name]
    every = [drawn(r, shapes[r]).requires_grad_() for r in range(P)]
    expected = alone(every)
    sum(loss(r, outputs) for r, outputs in enumerate(expected)).backward()
    x = every[RANK].detach().clone().requires_grad_()
    found = call(x)
    for one, other in zip(found, expected[RANK], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-13)
    loss(RANK, found).backward()
    # Nothing may depend on this rank's tensor.
    gradient = torch.zeros_like(x) if every[RANK].grad is None else every[RANK].grad
    torch.testing.assert_close(x.grad, gradient, rtol=1e-12, atol=1e-12)
