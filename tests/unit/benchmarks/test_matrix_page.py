"""A matrix without ranks: which cells there are, what follows from results, and the page."""

import math
import re
from pathlib import Path

import pytest

pytest.importorskip("mpi4py")
from benchmarks.matrix import cells
from benchmarks.matrix.page import gain, verdict, write_page
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
from mpitrain.config import ConfigError, expect, load


def result(losses, seconds, **more):
    return Result("done", losses=losses, seconds=seconds, **more)


def matrix(found, steps=4):
    return Matrix(
        VERSION, 4, steps, 20.0, "mpirun <x>", {"cores": "2"}, {"numpy": "2"}, "today",
        {cell.key: one for cell, one in found.items()},
    )  # fmt: skip


def cell(method=DENSE, algorithm="ring", layout="data", link=SHARED, job="digits"):
    return Cell(job, method, algorithm, layout, link)


def test_smooth_losses_are_means_over_the_last_ten():
    losses = [float(i) for i in range(25)]
    smooth = result(losses, losses).smooth
    assert smooth[0] == 0.0 and smooth[3] == 1.5
    assert smooth[24] == sum(range(15, 25)) / 10


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
    found = matrix(
        {cell(link="100 Mb/s"): short, cell(): long, cell("int8"): result([0.0] * 9, [1.0] * 9)}
    )
    assert found.target("digits") == 3.0  # the mean of 4, 3 and 2
    assert math.isnan(found.target("gpt"))


def test_what_wins_is_said_with_how_much_and_why():
    dense = result([2.0, 1.0], [10.0, 20.0], sent_bytes=4e6)
    code = result([2.0, 1.0], [2.0, 4.0], sent_bytes=1e6)
    rows = [(cell(), dense), (cell("int8"), code)]
    text = verdict(rows, 1.5, 30)
    assert "int8 comes to a loss of 1.5 5.0 times sooner than a dense sum by ring, in 4.0 s" in text
    assert "sends 1 MB a step, not 4 MB, and a step takes 2e+03 ms, not 1e+04 ms" in text
    slow = result([2.0, 1.0], [20.0, 40.0], codec_share=0.25)
    text = verdict([(cell(), dense), (cell("int8"), slow)], 1.5, 30)
    assert "nothing pays: a dense sum by ring comes to a loss of 1.5 first, in 20 s" in text
    assert "before int8 in 40 s, which spends 25% of its time in codes" in text
    assert "no run comes to a loss of 0.1 in" in verdict(rows, 0.1, 30)
    assert "no dense sum does in" in verdict([(cell(), result([3.0], [9.0])), rows[1]], 1.5, 30)
    assert "no dense run to compare with" in verdict(rows[1:], 1.5, 30)


def test_the_best_dense_algorithm_is_what_a_method_is_compared_with():
    ring, butterfly = result([1.0], [10.0]), result([1.0], [4.0])
    rows = [
        (cell(), ring),
        (cell(algorithm="butterfly"), butterfly),
        (cell("int8"), result([1.0], [2.0])),
    ]
    assert "2.0 times sooner than a dense sum by butterfly" in verdict(rows, 1.0, 30)


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


@pytest.mark.parametrize("method", cells.METHODS)
def test_each_method_is_a_job_of_replicas(method):
    job = load(cells.example(cell(method)), [*cells.overrides(cell(method))])
    assert (job.compress.codec == "none") == (method in (DENSE, "local", "diloco", "delayed"))
    assert job.sync.drifts == (method in ("local", "diloco", "delayed"))
    expect(job, "link")


@pytest.mark.parametrize(
    "override",
    ["parallel.checksums=true", "parallel.node_shared=true", "server.ranks=1"],
)
def test_what_would_arrive_at_once_is_refused_on_a_link(override):
    expect(load(Path("digits_mlp")), "link")
    job = load(Path("digits_mlp"), [override])
    with pytest.raises(ConfigError, match=f"^{override.partition('=')[0]}: a link of"):
        expect(job, "link")


def test_what_is_chosen_is_all_combinations():
    found = cells.chosen([], ["none", "int8", "none"], [], [], [SHARED, "far", "far"])
    assert found == [
        cell(method, link=link) for method in ("none", "int8") for link in (SHARED, "far")
    ]
    with pytest.raises(ValueError, match="there is no layout 'ring'; there are data, "):
        cells.chosen([], [], [], ["ring"], [])
    with pytest.raises(ValueError, match="there is no codec 'topck'; there are bf16"):
        cells.chosen([], ["topk", "topck"], [], [], [])
    with pytest.raises(ValueError, match="no allreduce algorithm 'rign'; did you mean 'ring'"):
        cells.chosen([], [], ["rign"], [], [])
    with pytest.raises(ValueError, match="no part of a link"):
        cells.chosen([], [], [], [], ["moon"])


def test_the_file_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "matrix.json"
    found = matrix({cell(): result([1.0], [2.0]), cell("x"): Result("refused", "no <b>")})
    write_matrix(path, found)
    assert read_matrix(path) == found
    path.write_text(path.read_text().replace('"version": 1', '"version": 7'))
    with pytest.raises(ValueError, match="is of version 7"):
        read_matrix(path)
    path.write_text("{")
    with pytest.raises(ValueError, match="cannot read"):
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


def test_a_page_of_nothing(tmp_path):
    write_page(matrix({}), tmp_path / "page.html")
    assert "Nothing was trained yet." in (tmp_path / "page.html").read_text()


def test_the_headline_is_what_pays_most(tmp_path):
    """Not what pays first; a dense run that never comes there has taken all of its time."""
    pytest.importorskip("matplotlib")
    found = {}
    for link, seconds in (("1 Gb/s", 3.0), ("100 Mb/s", 1.0), ("far", 2.0)):
        found[cell(link=link)] = result([2.0, 1.0], [3.0, 6.0])
        found[cell("int8", link=link)] = result([2.0, 1.0], [seconds, 1.5 * seconds])
    head = 'class="answer">On {}, '

    def page():
        write_page(matrix(found, 2), tmp_path / "page.html")
        return (tmp_path / "page.html").read_text()

    assert head.format("100 Mb/s") + "int8" in page()
    found[cell(link="slow")] = result([2.0], [30.0])
    found[cell("int8", link="slow")] = result([2.0, 1.0], [2.0, 4.0])
    found[cell(job="gpt")] = result([2.0, 1.0], [30.0, 60.0])  # alone: nothing to compare with
    assert head.format("slow") + "int8" in page()
    for one in [one for one in found if one.method != DENSE]:
        del found[one]
    assert head.format("1 Gb/s") + "nothing pays" in page()
    assert gain([(cell("int8"), result([1.0], [1.0]))], 1.0) == 1.0
