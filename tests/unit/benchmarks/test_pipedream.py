"""PipeDream's table: models of the published sizes, and what the guide says of them."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.pipedream import inception_v3, s2vt, vgg16

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("model", "parameters", "multiplications"),
    [(vgg16, 138_357_544, 15.47e9), (inception_v3, 23_834_568, 5.71e9)],
)
def test_models_have_their_published_sizes(model, parameters, multiplications):
    """Sizes of torchvision, Inception-v3 without the 3,326,696 parameters of its auxiliary head."""
    assert sum(layer.parameters for layer in model()) == parameters
    found = sum(layer.multiplications for layer in model())
    assert found == pytest.approx(multiplications, rel=1e-3)


def test_the_captioner_has_the_size_of_its_published_file():
    assert 4 * sum(layer.parameters for layer in s2vt()) == pytest.approx(349_436_137, rel=1e-4)


def test_the_guide_has_the_table_of_the_command():
    guide = (ROOT / "docs" / "parallelism.md").read_text(encoding="utf-8")
    command = [sys.executable, "-m", "benchmarks.pipedream"]
    printed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert printed.strip() in guide
