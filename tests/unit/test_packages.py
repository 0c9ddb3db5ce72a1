"""Names, extras and versions of the distribution, which ``make wheel-check`` tries out."""

import re
import tomllib
from pathlib import Path

import pytest

import collectives
import mpitrain
from collectives.errors import INSTALL_CUPY
from mpitrain.metrics.sinks import PACKAGES

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MODULES = [path for name in ("collectives", "mpitrain") for path in (ROOT / name).rglob("*.py")]


def test_what_errors_say_to_install_is_published_and_in_the_extra_that_they_name():
    extras = {
        extra: {re.split("[=><[]", name)[0] for name in names}
        for extra, names in PROJECT["optional-dependencies"].items()
    }
    text = "".join(p.read_text() for p in (*MODULES, *(ROOT / "benchmarks").glob("*.py")))
    assert "pip install 'mpitrain[" not in text, "which is not published"
    named = set(re.findall(r"""\b(?:install|needed)\(["'](\S+)["'], ["'](\w+)["'][,)]""", text))
    named |= {(package, extra) for extra, package in PACKAGES.items()}
    assert {extra for _, extra in named} == {
        "bfloat16", "data", "gloo", "mlflow", "plot", "secure", "tensorboard", "torch", "wandb"
    }  # fmt: skip
    assert all(package in extras[extra] for package, extra in named)
    assert set(re.findall(r"cupy-cuda\d+x", INSTALL_CUPY)) == extras["cuda12"] | extras["cuda13"]


def test_lowest_has_the_oldest_release_that_each_bound_allows():
    core, extras = PROJECT["dependencies"], PROJECT["optional-dependencies"]
    bounds = [bound for bounds in (core, *extras.values()) for bound in bounds if ">=" in bound]
    allowed = dict(bound.split(">=") for bound in bounds)
    pinned = dict(re.findall(r"^(\S+)==(\S+)$", (ROOT / "tests/lowest.txt").read_text(), re.M))
    assert set(pinned) >= {bound.split(">=")[0] for bound in core}
    for package, version in pinned.items():
        assert f"{version}.".startswith(f"{allowed[package]}.")


@pytest.mark.parametrize("package", [collectives, mpitrain], ids=lambda p: p.__name__)
def test_every_name_of_the_face_is_there(package):
    assert list(package.__all__) == sorted(package.__all__)
    assert set(package.__all__) <= set(dir(package))
    for name in package.__all__:
        assert getattr(package, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        package.nothing  # noqa: B018
