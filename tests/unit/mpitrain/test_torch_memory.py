"""Tensors of a module in one memory change with one another in torch, and are refused."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mpitrain.adapters.torch import layers

nn = torch.nn
#: How a tensor of the shape (4, 4) may lie in memory of 48 numbers.
VIEWS = {
    "own": lambda flat: torch.zeros(4, 4),
    "first": lambda flat: flat[:16].view(4, 4),
    "second": lambda flat: flat[16:32].view(4, 4),
    "transposed": lambda flat: flat[:16].view(4, 4).t(),
    "overlapping": lambda flat: flat[8:24].view(4, 4),
    "even": lambda flat: flat[:32:2].view(4, 4),
    "odd": lambda flat: flat[1:33:2].view(4, 4),
    "left": lambda flat: flat.view(6, 8)[:4, :4],
    "right": lambda flat: flat.view(6, 8)[:4, 4:],
    "expanded": lambda flat: flat[44:].expand(4, 4),
    "negative": lambda flat: torch._neg_view(flat[16:32]).view(4, 4),
    "of NumPy": lambda flat: torch.from_numpy(flat.numpy()[20:36].reshape(4, 4)),
}
ROLES = ["trained", "frozen", "buffer", "attribute", "list"]


class Holds(nn.Module):
    """A tensor as a parameter, a buffer or a plain attribute."""

    def __init__(self, tensor, role):
        super().__init__()
        self.lin = nn.Linear(4, 4)
        if role in ("trained", "frozen"):
            self.held = nn.Parameter(tensor, requires_grad=role == "trained")
        elif role == "buffer":
            self.register_buffer("held", tensor)
        else:
            self.held = tensor if role == "attribute" else [tensor]

    def forward(self, x):
        return self.lin(x)


def held(part):
    return part.held[0] if isinstance(part.held, list) else part.held


def changes_another(parts, roles):
    """Whether a change of something that is trained is one of something else, too."""
    for part, role in zip(parts, roles, strict=True):
        if role != "trained":
            continue
        for place in range(16):
            before = [held(other).detach().clone() for other in parts]
            with torch.no_grad():
                held(part)[divmod(place, 4)] += 1
            changed = sum(int((held(p) != b).sum()) for p, b in zip(parts, before, strict=True))
            if changed != 1:
                return True
    return False


@settings(max_examples=150, deadline=None)
@given(
    drawn=st.lists(
        st.tuples(st.sampled_from(list(VIEWS)), st.sampled_from(ROLES)), min_size=1, max_size=4
    ),
    one=st.booleans(),
)
def test_what_shares_memory_with_something_trained_is_refused_and_nothing_else(drawn, one):
    """In one part or in several."""
    flat = torch.zeros(48)
    parts = [Holds(VIEWS[view](flat), role) for view, role in drawn]
    module = nn.Sequential(nn.Sequential(*parts) if one else parts[0], *(() if one else parts[1:]))
    if changes_another(parts, [role for _, role in drawn]):
        with pytest.raises(ValueError, match=r"held.*(in one memory|place of memory).*clone"):
            layers(module)
    else:
        assert layers(module)


def test_both_names_and_what_to_write_are_told():
    """Also behind a cut, and of the module that the trained values are to go into."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    module[2].weight.data = module[0].weight.data
    for cuts in ([], ["1"]):
        with pytest.raises(ValueError, match=r"0\.weight and 2\.weight .*b\.weight = a\.weight"):
            layers(module, cuts, torch.ones(2, 4).numpy())
    module[2].weight = module[0].weight
    assert layers(module)["part2"].tied == {"weight": "part0.weight"}


def test_running_values_of_two_batch_norms():
    one, other = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    other.running_mean = one.running_mean
    with pytest.raises(ValueError, match=r"running_mean and .*running_mean are two tensors in one"):
        layers(nn.Sequential(one, other))
    assert layers(nn.Sequential(nn.Sequential(one, one)))
