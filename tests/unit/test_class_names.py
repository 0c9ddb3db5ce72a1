"""A class name means one thing in each package."""

import ast
from collections import defaultdict
from pathlib import Path

import pytest

from tests.documents import ROOT


@pytest.mark.parametrize("package", ["collectives", "mpitrain"])
def test_each_class_name_stands_once_in_a_package(package):
    places: dict[str, list[Path]] = defaultdict(list)
    for path in sorted((ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(path.relative_to(ROOT))
    several = {name: paths for name, paths in places.items() if paths[1:]}
    assert not several
