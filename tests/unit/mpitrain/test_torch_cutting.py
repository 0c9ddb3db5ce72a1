"""Parts of a torch module, for the stages of a pipeline, are its own forward pass."""

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mpitrain.adapters.torch import layers
from mpitrain.adapters.torch.modules.cutting import cut
from mpitrain.adapters.torch.modules.splits import Plan, Split
from mpitrain.adapters.torch.modules.tensor_parallel import share
from mpitrain.adapters.torch.modules.whole import trained
from mpitrain.fields import joined
from mpitrain.group import TensorGroup
from mpitrain.nn import Context
from tests.zoo.parts import Of

nn = torch.nn


class Forked(nn.Module):
    """Two branches, a parameter and a buffer of its own, and a layer that is used twice."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.full((6,), 0.5))
        self.register_buffer("scale", torch.full((6,), 2.0))
        self.body = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.twice = nn.Linear(6, 6)
        self.head = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))

    def forward(self, x):
        x = self.body(x + self.shift)
        y = self.twice(x) * self.scale
        return self.head(self.twice(y) + y + self.shift)


class Dense(nn.Module):
    """Each block gives several things, one of them for all samples, and one that is no tensor."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin, self.bias = nn.Linear(6, 6), nn.Parameter(torch.randn(1, 6))

        def forward(self, x, *, seen=(), bias=None):
            y = torch.tanh(self.lin(x) + (self.bias if bias is None else bias))
            return {"y": y, "seen": (*seen, y), "bias": self.bias * 2, "cache": object(), "n": 3}

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Dense.Block() for _ in range(3))

    def forward(self, x, kept):
        found = {"y": torch.where(kept, x, 0.0), "seen": (), "bias": None}
        for block in self.blocks:
            found = block(found["y"], seen=found["seen"], bias=found["bias"])
            assert found["n"] == 3
        y = found["seen"][0] * found["seen"][2] * kept
        if kept.any():
            y = y * 2
        return {"y": y, "cache": found["cache"]}


def in_parts(made, x):
    """Results of the layers one after the other."""
    context = Context(True, 3, 5, np.arange(len(x)))
    for name, layer in made.items():
        x, _ = layer.forward(layer.parameters(None, np, "float64"), x, context.inside(name))
    return x


def test_a_module_is_cut_behind_some_of_its_modules():
    torch.manual_seed(0)
    module, x = Forked().double(), torch.randn(4, 6).double()
    parts = cut(module, ["body", "head.0"], x.numpy())
    found = x
    for part in parts:
        found = part(found)
    assert torch.equal(found, module(x))
    names = [{name for name, _ in part.named_parameters()} for part in parts]
    assert names[0] == {"shift", "body.0.weight", "body.0.bias"}
    assert names[1] == {"shift", "twice.weight", "twice.bias", "head.0.weight", "head.0.bias"}
    assert names[2] == {"head.1.weight", "head.1.bias"}
    assert [list(dict(part.named_buffers())) for part in parts] == [["scale"]] * 3
    assert dict(parts[1].named_parameters())["shift"] is module.shift
    # A parameter of two parts is the first one's.
    made = layers(module, ["body"], x.numpy())
    assert made["part1"].tied == {"shift": "part0.shift"}
    assert trained(module, made)["part1.head.1.bias"] is module.head[1].bias


class Conv1D(nn.Module):
    """A matrix as transformers has it."""

    nf = 3

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(2, 3)), nn.Parameter(torch.randn(3))

    def forward(self, x):
        return x @ self.weight + self.bias


@pytest.mark.parametrize(("make", "word"), [(lambda: nn.Linear(2, 3), "input"), (Conv1D, "x")])
def test_a_matrix_of_shared_rows_is_called_as_its_class_is(make, word):
    module, x = nn.ModuleList([make()]), torch.randn(4, 2)
    copy = share(module, Plan({"0": Split("rows")}), TensorGroup()).module[0]
    assert torch.allclose(copy(**{word: x}), module[0](x))
    assert torch.equal(copy(x), copy(**{word: x}))


def test_blocks_with_several_results():
    torch.manual_seed(0)
    module, x = Dense().double(), torch.randn(3, 6).double()
    kept = torch.rand(3, 6) > 0.3
    record = np.empty(3, [("x", "f8", (6,)), ("kept", "?", (6,))])
    record["x"], record["kept"] = x, kept
    parts = cut(module, "blocks", record)
    assert len(parts) == 4
    for rows in (slice(3), slice(1, 2)):
        found = parts[0](x=x[rows], kept=kept[rows])
        assert found.keys() == {"made_0_0", "made_0_1", "made_0_2", "given_kept"}
        for part in parts[1:]:
            found = part(**found)
        wanted = module(x[rows], kept[rows])["y"]
        assert torch.equal(found["y"], wanted)
        by = torch.autograd.grad(found["y"].sum(), list(module.parameters()), allow_unused=True)
        whole = torch.autograd.grad(wanted.sum(), list(module.parameters()), allow_unused=True)
        for one, other in zip(by, whole, strict=True):
            assert (one is None) == (other is None)
            assert one is None or torch.allclose(one, other, rtol=1e-12)


class Resting(Forked):
    def forward(self, x):
        with torch.no_grad():
            x = self.body(x)
        return self.head(self.twice(x) if self.training else self.twice(x) * 1.0)


def test_a_branch_a_mode_and_no_grad_are_those_of_the_module():
    torch.manual_seed(0)
    module, x = Resting().double(), torch.randn(4, 6).double()
    parts = cut(module, ["body"], x.numpy())
    y = parts[0](x)
    assert not y.requires_grad
    assert torch.equal(parts[1](y), module(x))


def around(forward):
    """Makes layers and a batch norm, in a forward pass of the test's own."""
    return lambda: Of(
        forward,
        enter=nn.Linear(6, 6),
        norm=nn.BatchNorm1d(6),
        leave=nn.Linear(6, 6),
        flat=nn.Flatten(0),
    )


def on_both_sides(m, x):
    return m.leave(m.enter(x) + x)


CANNOT = [
    (Forked, ["bodi"], "no module 'bodi'; did you mean 'body'"),
    (Forked, ["head", "body"], "not in the order in which they are called, once each: body, h"),
    (Forked, ["body", "body.1"], "not in the order"),
    (Forked, ["twice"], "once each: twice, twice"),
    (around(lambda m, x: m.leave(m.flat(x).reshape(-1, 6))), ["flat"],
     r"'flat' gives a tensor of shape \(18,\) for 3 samples"),
    (around(lambda m, x: on_both_sides(m, m.norm(x))), ["enter"],
     r"part1.norm \(BatchNorm1d\) is in part0, too, and has one running"),
    (around(lambda m, x: on_both_sides(m, x * torch.rand(x.shape))), ["enter"],
     "random numbers are drawn between the modules behind which it is cut"),
    (around(lambda m, x: m.leave(m.enter(x)).nothing), ["enter"],
     "cannot be tried in parts on 3 samples .AttributeError"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "after", "message"), CANNOT)
def test_cuts_that_cannot_be(make, after, message):
    torch.manual_seed(0)
    with pytest.raises(ValueError, match=message):
        cut(make(), after, np.random.default_rng(0).normal(size=(3, 6)))


class Dropping(nn.Module):
    """Draws numbers within its blocks, by which Python goes, too, as in adapters of peft."""

    class Block(nn.Sequential):
        def forward(self, x):
            return super().forward(x) if torch.rand(1) > 0.2 else x

    def __init__(self):
        super().__init__()
        blocks = (Dropping.Block(nn.Linear(6, 6), nn.Dropout(0.3)) for _ in range(3))
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


def test_a_trial_for_another_length_leaves_the_pass_as_it_was():
    """Numbers that are drawn for samples of a new shape are tried within the pass."""
    torch.manual_seed(0)
    module = Dropping().double()
    ways = [layers(module, cuts, np.ones((3, 5, 6))) for cuts in (["blocks.0", "blocks.1"], [])]
    for length in (5, 7):
        x = np.random.default_rng(length).normal(size=(4, length, 6))
        found, wanted = (in_parts(way, x) for way in ways)
        np.testing.assert_allclose(found, wanted, rtol=1e-12)


class Positions(nn.Module):
    """As wide as the samples of its trial are long."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
        self.words, self.places = nn.Embedding(3, 8), nn.Parameter(torch.ones(8, 8))

    def forward(self, x):
        return self.blocks(self.words(x) + self.places[: x.shape[1]])


def test_another_length_is_told_where_the_trial_s_is_another_size_too():
    parts = layers(Positions().double(), ["blocks.0", "blocks.1"], np.ones((3, 8), int))
    in_parts(parts, np.ones((4, 8), int))
    with pytest.raises(ValueError, match="have length 8, which is another size of the module, too"):
        in_parts(parts, np.ones((4, 5), int))


@pytest.mark.parametrize("tied", [False, True])
def test_a_part_computes_where_its_input_lies(tied):
    """On torch's device without numbers."""

    class OneDevice(TorchDispatchMode):
        """Refuses to mix devices, as operations of a GPU do."""

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            tensors = [one for one in tree_leaves((args, kwargs)) if torch.is_tensor(one)]
            assert len({one.device for one in tensors if one.dim()}) < 2, function
            return function(*args, **kwargs or {})

    class Positions(nn.Module):
        """Positions and a parameter that are used outside of all modules."""

        def __init__(self):
            super().__init__()
            self.table, self.shift = nn.Embedding(11, 8), nn.Parameter(torch.randn(8))
            self.blocks = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
            self.head = nn.Linear(8, 11, bias=False)
            if tied:
                self.head.weight = self.table.weight

        def forward(self, ids, bias):
            x = self.blocks(self.table(ids) + self.shift + bias[..., None])
            return self.head(x + self.shift + bias[..., None])

    ids = np.tile(np.arange(6), (4, 1))
    inputs = joined({"ids": ids, "bias": ids.astype(np.float32)})
    x = {"ids": torch.from_numpy(ids).to("meta"), "bias": torch.zeros(4, 6, device="meta")}
    for part in cut(Positions(), ["blocks.0", "blocks.1"], inputs):
        values = {n: v.to("meta") for n, v in [*part.named_parameters(), *part.named_buffers()]}
        args, options = ((), x) if isinstance(x, dict) else ((x,), {})
        with OneDevice():
            x = torch.func.functional_call(part, values, args, options)
    assert x.device.type == "meta" and x.shape == (4, 6, 11)


def test_an_optimiser_is_given_parameters_in_the_module_s_order():
    """Wherever it is cut, and though it calls them in another: its groups may go by places."""
    module = Of(lambda m, x: m.head(m.body(x).tanh()), head=nn.Linear(6, 3), body=nn.Linear(6, 6))
    found = trained(module, layers(module, ["body"], np.zeros((3, 6), np.float32)))
    assert list(found) == ["part1.head.weight", "part1.head.bias", *list(found)[2:]]
    assert list(map(id, found.values())) == list(map(id, module.parameters()))


def test_what_python_reads_behind_a_cut_steers_nothing_before_it():
    def reads(m, x):
        y = m.norm(m.enter(x))
        m.mean = float(y.detach().mean())
        return m.leave(y)

    first, _ = cut(around(reads)(), ["enter"], np.ones((3, 6)))
    assert [name for name, _ in first.named_parameters()] == ["enter.weight", "enter.bias"]
