"""A matrix without ranks: which cells there are, what follows from results, and the page."""

import math
import re

import pytest

from benchmarks.matrix import cells
from benchmarks.matrix.page import write_page
from benchmarks.matrix.results import (
    DENSE,
    SHARED,
    VERSION,
    Cell,
    Matrix,
    Result,
    read_matrix,
    write_matrix,
)
from collectives import Link
from mpitrain.config import ConfigError, load


def result(losses, seconds, **more):
    return Result("done", losses=losses, seconds=seconds, **more)


def matrix(found, steps=4):
    return Matrix(
        VERSION, 4, steps, 20.0, "mpirun <x>", {"cores": "2"}, {"numpy": "2"}, "today",
        {cell.key: one for cell, one in found.items()},
    )  # fmt: skip


def cell(method=DENSE, algorithm="ring", layout="data", link=SHARED, job="digits"):
    return Cell(job, method, algorithm, layout, link)


def test_when_a_loss_is_reached():
    run = result([4.0, 2.0, 0.0], [1.0, 2.5, 4.0])
    assert run.smooth == [4.0, 3.0, 2.0]
    assert run.seconds_to(3.0) == 2.5
    assert run.seconds_to(1.9) == math.inf
    assert run.loss_at(3.9) == 3.0
    assert math.isnan(run.loss_at(0.5))
    assert run.seconds_a_step == 4.0 / 3


def test_the_target_is_of_the_longest_dense_run():
    short, long = result([9.0], [1.0]), result([4.0, 3.0, 2.0, 1.0], [1.0, 2.0, 3.0, 4.0])
    coded = result([0.0] * 9, [1.0] * 9)
    found = matrix({cell(link="100 Mb/s"): short, cell(): long, cell("int8"): coded})
    assert found.target("digits") == 3.0  # the mean of 4, 3 and 2
    assert math.isnan(found.target("gpt"))


def test_the_usual_cells():
    found = cells.usual()
    assert len(found) == len(set(found)) and set(found) <= set(cells.every())
    for method in cells.METHODS:
        assert {one.link for one in found if one.method == method} == set(cells.LINKS)
    assert {one.layout for one in found} == set(cells.LAYOUTS)
    assert {one.job for one in found} == set(cells.JOBS)
    for text in filter(None, cells.LINKS.values()):
        assert str(Link.read(text))


def test_cells_are_jobs_or_say_why_not():
    """Each loads, or is refused with the key that does not go."""
    for one in [*cells.usual(), *cells.quick()]:
        try:
            load(cells.example(one), [*cells.overrides(one)])
        except ConfigError as error:
            assert re.match(r"[a-z]+(\.[a-z]+)?: ", str(error)), str(error)


def test_the_file_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "matrix.json"
    found = matrix({cell(): result([1.0], [2.0]), cell("x"): Result("refused", "no <b>")})
    write_matrix(path, found)
    assert read_matrix(path) == found
    other = path.read_text().replace('"version": 1', '"version": 7')
    for text, told in ((other, "is of version 7"), ("{", "cannot read")):
        path.write_text(text)
        with pytest.raises(ValueError, match=told):
            read_matrix(path)


def test_the_page(tmp_path):
    pytest.importorskip("matplotlib")
    more = {"algorithm": "two-phase of int8", "settings": ["compress.codec=int8"]}
    found = {
        cell(): result([2.0, 1.0], [1.0, 2.0], sent_bytes=4e6, test_loss=0.5),
        cell("int8"): result([2.0, 1.0], [2.0, 3.0], sent_bytes=1e6, **more),
        cell(link="100 Mb/s"): result([2.0, 1.0], [10.0, 20.0], sent_bytes=4e6),
        cell("int8", link="100 Mb/s"): result([2.0, 1.0], [2.0, 4.0], sent_bytes=1e6),
        cell("int8", layout="zero 1", link="100 Mb/s"): result([2.0], [2.0], sent_bytes=1e6),
        cell("<i>"): Result("refused", "there is no <i>"),
        cell(job="gpt"): Result("failed", "the ranks ended in it 2 times", 2),
    }
    write_page(matrix(found, 2), tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert page.count("<svg") == 2  # two links
    assert not re.search(r"(src|href)=[\"']?http|<script|@import", page)
    assert "<td>int8</td><td>compress.codec=int8</td>" in page
    assert "two-phase of int8" in page and "<summary>zero 1</summary>" in page
    assert "there is no &lt;i&gt;" in page and "<i>" not in page
    assert "the ranks ended in it 2 times" in page and "mpirun &lt;x&gt;" in page
    assert "On 100 Mb/s, int8 comes to a loss of 1.5 5.0 times sooner" in page
    assert "nothing pays: a dense sum by ring" in page
    for number in range(2):
        assert f"var(--series{number})" in page and f"--series{number}:" in page
