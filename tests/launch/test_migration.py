"""The programs of docs/from-torch.md end with one loss."""

import re

import pytest

from tests.documents import snippets
from tests.launch.programs import ROOT, needs_launcher, needs_torch, run_text

pytestmark = [needs_launcher, pytest.mark.slow, needs_torch]
PAGE = ROOT / "docs" / "from-torch.md"


def programs():
    found = [text for _, text in snippets(PAGE) if text.startswith("# ")]
    assert ["collectives.torch" in text.partition("\n")[0] for text in found] == [True, False]
    return found


def loss(told):
    return re.findall(r"^loss ([\d.]+)$", told, re.MULTILINE)[-1]


def started(folder, ranks, text, *before, **variables):
    done = run_text(folder, text, before=before, ranks=ranks, **variables)
    assert done.returncode == 0 and (ranks is None or "Warning" not in done.stderr), done.stderr
    return done.stdout


def test_torch_s_script_ends_over_mpi_as_alone(tmp_path):
    text, how = programs()[0], ("-m", "collectives.torch")
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    found = [loss(started(tmp_path, ranks, text, *how)) for ranks in (1, 2)]
    assert found == [loss(started(tmp_path, None, text, **alone))] * 2


#: Ranks with 3 and 5 samples, whose gradient is to be that of one process with all 8.
UNEQUAL = """
import torch
import torch.distributed as dist
dist.init_process_group("collectives", "mpi://")
torch.manual_seed(0)
module, criterion = torch.nn.Linear(4, 2).double(), torch.nn.functional.mse_loss
x, y = torch.randn(8, 4).double(), torch.randn(8, 2).double()
criterion(module(x), y).backward()
right = module.weight.grad.clone()
module.zero_grad()
net = torch.nn.parallel.DistributedDataParallel(module)
own = slice(3) if dist.get_rank() == 0 else slice(3, 8)
inputs, labels = x[own], y[own]
{snippet}
loss.backward()
torch.testing.assert_close(module.weight.grad, right)
print("equal")
"""


def test_means_over_unequal_batches_are_those_of_one_process(tmp_path):
    (snippet,) = (text for _, text in snippets(PAGE) if text.startswith("dist.all_reduce"))
    assert started(tmp_path, 2, UNEQUAL.format(snippet=snippet)).count("equal") == 2


def test_the_trainer_ends_alike_in_every_layout(tmp_path):
    text, usual = programs()[-1], '{"zero": 1}'
    assert usual in text
    ways = [(1, usual), (2, usual), (2, '{"zero": 3}'), (2, '{"pipe": 2}')]
    found = {loss(started(tmp_path, n, text.replace(usual, layout))) for n, layout in ways}
    assert len(found) == 1


def test_keys_of_the_trainer_are_those_of_a_job():
    """``name=value`` and ``table={...}`` in the tables of the page."""
    from mpitrain.config import Config, Model, configured

    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    said = [cell for row in rows for cell in re.findall(r"`(\w+=[^`]+)`", row.split(" | ", 1)[1])]
    keys = [cell for cell in said if not re.match(r"model=|schedule=l|.*mpitrain\.", cell)]
    assert len(keys) > 12
    for key in keys:
        configured(Config(model=Model(kind="mlp")), eval(f"dict({key})"))
