"""What ``mpitrain certify`` notes of runs, in one process."""

import numpy as np
import pytest
import torch
from mpi4py import MPI

from mpitrain import trainer
from mpitrain.adapters.torch.modules import stand_ins
from mpitrain.certify.certificate import Certifier
from mpitrain.certify.loops import install
from mpitrain.certify.record import Session
from mpitrain.certify.scripts import _TorchWatch
from mpitrain.commands.arguments import parse
from mpitrain.commands.certify import run
from mpitrain.config import ConfigError

nn, F = torch.nn, torch.nn.functional


def test_a_job_is_given_no_arguments():
    options = parse(["certify", "digits", "--", "--set", "optim.lr=1"])
    with pytest.raises(ConfigError, match=r"-- --set optim\.lr=1: a job file takes no arguments"):
        run(MPI.COMM_SELF, options)


class Noisy(nn.Linear):
    def forward(self, x):
        return super().forward(x) * np.random.rand()


@pytest.mark.parametrize(
    ("module", "loss", "who"),
    [
        (nn.Linear(3, 1), torch.sum, ""),
        (nn.Linear(3, 1), lambda y: F.dropout(y).sum(), "the loss"),
        (Noisy(3, 1), torch.sum, "Noisy"),
    ],
)
def test_random_numbers_of_a_script_have_a_name(module, loss, who):
    session = Session(1, {}, is_double=False)
    watch = _TorchWatch(session)
    for _ in range(2):
        y = watch.call(type(module).__call__, module, torch.ones(4, 3))
        watch.backward(torch.autograd.backward, loss(y))
        torch.rand(1)  # as a loader does
    assert session.record.draws == who


def test_running_values_of_batch_norm_are_compared(tmp_path, monkeypatch):
    x = torch.randn(16, 3, generator=torch.Generator().manual_seed(1))
    data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))

    def program():
        parts = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)
        given = {"model": nn.Sequential(*parts), "train_data": data, "loss": F.mse_loss}
        with trainer.Trainer(**given, batch_size=8, epochs=1, shadow=0) as made:
            made.fit()

    def seeded():
        torch.manual_seed(0)
        program()

    install(trainer)
    found = Certifier(MPI.COMM_WORLD, seeded, str(tmp_path), 2, sees_torch=False)
    assert found.refer().verdict == "PASS"
    assert found.certify({}).verdict == "PASS"
    usual = stand_ins.follow

    def follow(state, mean, squares, count, part):
        usual(state, mean, squares, count, part / 2)

    monkeypatch.setattr(stand_ins, "follow", follow)
    wrong = found.certify({}, "of this test")  # beside the same reference
    assert (wrong.verdict, wrong.where) == ("FAIL", "parameters after step 1")
    assert "part1.running_" in wrong.text
