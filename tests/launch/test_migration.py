"""The programs of docs/from-torch.md end with one loss."""

import re

import pytest

from tests.documents import snippets
from tests.launch.programs import needs_torch
from tests.launch.programs import run as started
from tests.launch.test_examples import ROOT, pytestmark, run

pytestmark = [*pytestmark, pytest.mark.slow, needs_torch]
PAGE = ROOT / "docs" / "from-torch.md"


def programs():
    """torch's, the loop and the trainer."""
    found = [text for _, text in snippets(PAGE) if text.startswith("# ")]
    assert [text.split()[1] for text in found] == ["torchrun", "mpirun", "mpirun"]
    return found


def loss(told):
    return re.findall(r"^loss ([\d.]+)$", told, re.MULTILINE)[-1]


@pytest.fixture
def written(tmp_path):
    def write(text):
        (tmp_path / "train.py").write_text(text)
        return tmp_path / "train.py"

    return write


def test_the_loop_ends_as_torch_alone(written, tmp_path):
    torchs, loop, _ = programs()
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = started(tmp_path, written(torchs), **alone)
    assert done.returncode == 0, done.stderr
    program = written(loop)
    found = [loss(run(tmp_path, ranks, program)) for ranks in (1, 2)]
    assert found == [loss(done.stdout)] * 2


def test_the_trainer_ends_alike_in_every_layout(written, tmp_path):
    text = programs()[-1]
    found = [loss(run(tmp_path, ranks, written(text))) for ranks in (1, 2)]
    for layout in ('{"zero": 3}', '{"pipe": 2}'):
        assert '{"zero": 1}' in text
        found.append(loss(run(tmp_path, 2, written(text.replace('{"zero": 1}', layout)))))
    assert len(set(found)) == 1


def test_the_loop_differs_in_its_beginning_and_its_end_alone():
    torchs, loop, _ = (text.splitlines()[1:] for text in programs())
    assert [line for line in loop if line not in torchs] == [
        "from mpi4py import MPI",
        "from mpitrain.adapters.torch import DistributedDataParallel",
        "rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size",
    ]


def test_keys_of_the_trainer_are_those_of_a_job():
    """``name=value`` and ``table={...}`` in the tables of the page."""
    from mpitrain.config import Config, Model, configured

    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    said = [cell for row in rows for cell in re.findall(r"`(\w+=[^`]+)`", row.split(" | ", 1)[1])]
    keys = [cell for cell in said if not re.match(r"comm=|model=|schedule=l|COLLECTIVES", cell)]
    assert len(keys) > 12
    for key in keys:
        configured(Config(model=Model(kind="mlp")), eval(f"dict({key})"))
