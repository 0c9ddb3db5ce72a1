"""Replicas of a module that are compared bit by bit."""

import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

from collectives.torch.replicas import check_replicas  # noqa: E402

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.quick_on(2, 3),
    pytest.mark.usefixtures("world"),
]


@pytest.fixture
def module():
    torch.manual_seed(0)
    made = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
    made[1].bfloat16()
    return made


def last():
    return dist.get_rank() == dist.get_world_size() - 1


def raises(module, name, group=None):
    """The error, which all ranks must have, or none on one rank."""
    ranks = dist.get_world_size(group)
    if ranks == 1:
        return check_replicas(module, group)
    with pytest.raises(RuntimeError, match=rf"^{name} is another on ranks \[{ranks - 1}\]"):
        check_replicas(module, group)


@torch.no_grad()
@pytest.mark.parametrize("name", ["0.weight", "1.bias"])
def test_one_bit_of_one_rank_is_found(module, name):
    check_replicas(module)
    check_replicas(module, dist.new_group(backend="gloo"))
    bits = module.get_parameter(name).view(torch.uint8)
    bits.view(-1)[0] ^= last()
    raises(module, name)


@torch.no_grad()
def test_zeros_of_two_signs_differ_and_equal_nans_do_not(module):
    module[0].bias.fill_(float("nan"))
    check_replicas(module)
    module[0].bias.fill_(-0.0 if last() else 0.0)
    raises(module, "0.bias")


def test_other_parameters_differ(module):
    if last():
        module.append(torch.nn.Linear(1, 1))
    raises(module, "2.weight")
    if last():
        module[0].weight.data = module[0].weight.data.view(3, 2)  # the same bytes
    raises(module, "0.weight")


def test_a_group_is_compared_alone(module):
    first = dist.new_group([0])
    if last():
        torch.nn.init.zeros_(module[0].weight)
    if dist.get_rank() == 0:
        check_replicas(module, first)
