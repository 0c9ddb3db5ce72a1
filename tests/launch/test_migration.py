"""The programs of docs/from-torch.md end with one loss."""

import re

import pytest

from tests.documents import snippets
from tests.launch.programs import needs_torch
from tests.launch.programs import run as started
from tests.launch.test_examples import ROOT, pytestmark, run

pytestmark = [pytestmark, pytest.mark.slow, needs_torch]
PAGE = ROOT / "docs" / "from-torch.md"


def programs():
    """torch's and the trainer."""
    found = [text for _, text in snippets(PAGE) if text.startswith("# ")]
    assert ["collectives.torch" in text.partition("\n")[0] for text in found] == [True, False]
    return found


def loss(told):
    return re.findall(r"^loss ([\d.]+)$", told, re.MULTILINE)[-1]


@pytest.fixture
def written(tmp_path):
    def write(text):
        (tmp_path / "train.py").write_text(text)
        return tmp_path / "train.py"

    return write


def test_torch_s_script_ends_over_mpi_as_alone(written, tmp_path):
    program = written(programs()[0])
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = started(tmp_path, program, **alone)
    assert done.returncode == 0, done.stderr
    launcher = ("-m", "collectives.torch")
    found = [loss(run(tmp_path, ranks, *launcher, program)) for ranks in (1, 2)]
    assert found == [loss(done.stdout)] * 2


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


def test_means_over_unequal_batches_are_those_of_one_process(written, tmp_path):
    (snippet,) = (text for _, text in snippets(PAGE) if text.startswith("dist.all_reduce"))
    told = run(tmp_path, 2, written(UNEQUAL.format(snippet=snippet)))
    assert told.count("equal") == 2


def test_the_trainer_ends_alike_in_every_layout(written, tmp_path):
    text = programs()[-1]
    found = [loss(run(tmp_path, ranks, written(text))) for ranks in (1, 2)]
    for layout in ('{"zero": 3}', '{"pipe": 2}'):
        assert '{"zero": 1}' in text
        found.append(loss(run(tmp_path, 2, written(text.replace('{"zero": 1}', layout)))))
    assert len(set(found)) == 1


def test_keys_of_the_trainer_are_those_of_a_job():
    """``name=value`` and ``table={...}`` in the tables of the page."""
    from mpitrain.config import Config, Model, configured

    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    said = [cell for row in rows for cell in re.findall(r"`(\w+=[^`]+)`", row.split(" | ", 1)[1])]
    keys = [cell for cell in said if not re.match(r"model=|schedule=l", cell)]
    assert len(keys) > 12
    for key in keys:
        configured(Config(model=Model(kind="mlp")), eval(f"dict({key})"))
