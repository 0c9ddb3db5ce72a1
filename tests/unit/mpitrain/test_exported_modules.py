"""The file of ``export --torch`` is the state_dict of the module that was trained."""

import os

import pytest
import torch
from mpi4py import MPI

import mpitrain
from mpitrain.checkpoint.export import export
from mpitrain.checkpoint.manifest import CheckpointError
from tests.cases import mostly_slow

nn = torch.nn


class Adapted(nn.Module):
    """A frozen layer with a small trained one beside it, batch norm, and buffers."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Linear(6, 6).requires_grad_(False)
        self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 6, bias=False)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 1)
        self.register_buffer("scale", torch.full((6,), 2.0))
        self.register_buffer("counts", torch.arange(3))
        self.register_buffer("turned", torch.arange(6.0).reshape(2, 3).t())
        self.register_buffer("coarse", torch.ones(2, dtype=torch.bfloat16))
        self.register_buffer("unsaved", torch.ones(6), persistent=False)

    def forward(self, x):
        x = self.backbone(x) + self.up(self.down(x))
        return self.head(self.norm(x) * self.scale * self.unsaved)


class Tied(nn.Module):
    """One matrix in and out, and a frozen one under two names."""

    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
        self.leave.weight = self.enter.weight
        self.one = nn.Linear(6, 6, bias=False).requires_grad_(False)
        self.other = nn.Linear(6, 6, bias=False)
        self.other.weight = self.one.weight
        self.last = nn.Linear(6, 1)

    def forward(self, x):
        x = torch.tanh(self.other(torch.tanh(self.one(torch.tanh(self.enter(x))))))
        return self.last(self.leave(x))


MODULES = {
    "adapted": (Adapted, ()),
    "adapted, cut": (Adapted, ("backbone", "norm")),
    "tied": (Tied, ()),
    "tied, cut": (Tied, ("one",)),
}


def trained(folder, model, cuts=(), **given):
    x = torch.randn(32, 6, generator=torch.Generator().manual_seed(0))
    trainer = mpitrain.Trainer(
        MPI.COMM_SELF,
        model=model,
        cuts=cuts,
        train_data=torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)),
        loss=nn.functional.mse_loss,
        batch_size=8,
        epochs=2,
        checkpoint={"every": 3, "keep": 9},
        run={"dir": str(folder), "log_every": 1000},
        **given,
    )
    with trainer:
        trainer.fit()
    return trainer.module


@pytest.mark.parametrize(
    ("kind", "average"),
    [
        *mostly_slow([(kind, 0.0) for kind in MODULES], [(kind, 0.0) for kind in [*MODULES][::2]]),
        ("tied", 0.5),
    ],
)
def test_a_module_takes_all_of_it(tmp_path, kind, average):
    from safetensors.torch import load_file

    model, cuts = MODULES[kind]
    module = trained(tmp_path / "run", model, cuts, optim={"average": average})
    done = export(tmp_path / "run", tmp_path / "model.safetensors", torch=True)
    found, wanted = load_file(tmp_path / "model.safetensors"), module.state_dict()
    assert done.tensors == len(wanted)
    other = model()
    other.load_state_dict(found, strict=True)
    for one in (found, other.state_dict()):
        torch.testing.assert_close(one, {**wanted}, rtol=0, atol=0)  # of one type, too


def test_constants_are_written_once_and_are_those_that_were(tmp_path):
    trained(tmp_path / "run", Adapted)
    checkpoints = tmp_path / "run" / "checkpoints"
    assert len(list(checkpoints.glob("step-*"))) == 3
    (constants,) = checkpoints.glob("constants-*.safetensors")
    before = next(checkpoints.glob("step-*"))
    trained(tmp_path / "run", Adapted)  # anew: the checkpoints move
    export(checkpoints / "earlier" / before.name, tmp_path / "earlier.safetensors", torch=True)
    data = constants.read_bytes()
    constants.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(CheckpointError, match="its values differ from its name"):
        export(before, tmp_path / "model.safetensors", torch=True)
    constants.unlink()
    with pytest.raises(CheckpointError, match="copy that file of the run's checkpoints beside it"):
        export(before, tmp_path / "model.safetensors", torch=True)


def test_files_have_the_mode_that_the_umask_leaves_or_that_of_the_file_before(tmp_path):
    before = os.umask(0o027)
    try:
        trained(tmp_path / "run", Adapted)
        new, old = tmp_path / "new.safetensors", tmp_path / "old.safetensors"
        old.write_bytes(b"")
        old.chmod(0o664)
        for path in (new, old):
            export(tmp_path / "run", path, torch=True)
    finally:
        os.umask(before)
    found = {path: path.stat().st_mode & 0o777 for path in tmp_path.rglob("*.safetensors")}
    assert len(found) > 4
    assert {path.name for path, mode in found.items() if mode != 0o640} == {"old.safetensors"}
    assert found[old] == 0o664
