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
#: Rows of the block that each rank sends to rank r in an all-to-all.
ROWS = [2 * (r + 1) for r in range(P)]


def drawn(seed, shape):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def loss(rank, outputs):
    """A rank's loss, which weighs each number of each output differently."""
    terms = (drawn(1000 + 10 * rank + i, out.shape) * out**2 for i, out in enumerate(outputs))
    return sum(term.sum() for term in terms)


def only_on_last(r, outputs):
    return outputs if r == LAST else [0 * out for out in outputs]


#: What this rank calls on its tensor, and all ranks' results by one process.
CALLS = {
    "all_reduce, mean": (
        lambda x: [nn.all_reduce(x * 1, dist.ReduceOp.AVG)],
        lambda xs: [[sum(xs) / P]] * P),
    "all_to_all, unequal": (
        lambda x: nn.all_to_all([x.new_empty(ROWS[RANK], 3) for _ in ROWS], list(x.split(ROWS))),
        lambda xs: [[x.split(ROWS)[r] for x in xs] for r in range(P)]),
    "reduce": (
        lambda x: only_on_last(RANK, [nn.reduce(x * 1, LAST)]),
        lambda xs: [only_on_last(r, [sum(xs)]) for r in range(P)]),
    "gather": (
        lambda x: only_on_last(RANK, nn.gather(x, LAST)),
        lambda xs: [only_on_last(r, xs) for r in range(P)]),
    "scatter": (
        lambda x: [nn.scatter(list(x.chunk(P)), LAST)],
        lambda xs: [[block] for block in xs[LAST].chunk(P)]),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_gradients_are_those_of_one_process(name):
    call, alone = CALLS[name]
    every = [drawn(r, (sum(ROWS), 3)).requires_grad_() for r in range(P)]
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
