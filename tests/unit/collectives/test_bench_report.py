"""The benchmark's table: what is noise, and means that mean something."""

import pytest

from collectives.bench import report
from collectives.bench.measure import Result
from collectives.bench.osu import osu
from collectives.commands.arguments import rate

QUIET = [100.0, 101.0, 99.0, 100.0, 102.0]
NOISY = [100.0, 150.0, 90.0, 160.0, 100.0]


def result(algorithm, times, *, nbytes=1000, memory="numpy", collective="allreduce", ranks_us=()):
    return Result(
        collective, algorithm, algorithm, "asked for", nbytes, nbytes // 4, "float32", "sum",
        False, memory, 4, 10, times_us=list(times), ranks_us=list(ranks_us), wrong=0,
    )  # fmt: skip


def bandwidths(text):
    return [line for line in text.splitlines() if "bandwidth" in line]


@pytest.mark.parametrize(
    ("times", "cell"),
    [(QUIET, "1"), (NOISY, "50!"), ([5.0, 9.0], "-"), ([1.0, 99.0, 1.0, 99.0, 1.0], ">999!")],
)
def test_noise_is_visible(times, cell):
    head = report.columns()
    end = head.index("+-%") + len("+-%")
    row = report.row(result("ring", times), None)
    assert len(row) == len(head)
    assert row[end - 5 : end].strip() == cell


def test_the_share_of_a_links_peak_is_there_where_it_is_asked_for():
    found = result("ring", QUIET, nbytes=10_000_000)  # 100 GB/s over 100 us, times 1.5
    lines = report.columns(peak=rate("200GB/s")), report.row(found, None, peak=rate("1600Gb/s"))
    assert lines[0].split()[-1] == "peak%" and len(lines[0]) == len(lines[1])
    assert float(lines[1].split()[-1]) == 75.0
    assert rate("hdr") == rate("200Gb/s") == rate("25000MB/s") == 25.0


def test_one_algorithm_has_nccl_tests_last_line():
    results = [result("ring", QUIET), result("native", QUIET), result("ring", QUIET, nbytes=3000)]
    text = report.footer(results)
    assert bandwidths(text) == [f"# Avg bus bandwidth    : {report.average_busbw(results):.4f}"]
    assert "noisy" not in text and "min-busbw" not in text
    assert report.average_busbw(results) == pytest.approx((0.015 + 0.045) / 2)
    alone = report.footer([result("native", QUIET)])
    assert bandwidths(alone) == ["# Avg bus bandwidth    : 0.0150"]


def test_several_have_a_line_each():
    results = [
        result("ring", QUIET), result("butterfly", NOISY), result("native", QUIET),
        result("ring", QUIET, memory="shared", nbytes=2000),
    ]  # fmt: skip
    lines = report.footer(results, least=0.5).splitlines()
    assert not any(line.startswith("# Avg bus bandwidth    :") for line in lines)
    assert lines[2:6] == [
        "#   ring       numpy  : 0.0150",
        "#   butterfly  numpy  : 0.0150",
        "#   native     numpy  : 0.0150",
        "#   ring       shared : 0.0300",
    ]
    assert lines[6] == "# Mean of all rows that --min-busbw judges: 0.0200, at least 0.5 asked for"
    assert lines[7].startswith("# 1 of 4 rows are noisy (!)")


LATENCIES = "Avg Latency(us) Min Latency(us) Max Latency(us)"


@pytest.mark.parametrize(
    ("collective", "heads", "cells"),
    [
        ("allreduce", LATENCIES, "1000 2.50 1.00 4.00"),
        ("allgatherv", LATENCIES, "250 2.50 1.00 4.00"),
        ("scatter", LATENCIES, "250 2.50 1.00 4.00"),
        ("latency", "Avg Latency(us)", "1000 5.00"),
        ("bandwidth", "Bandwidth(MB/s)", "1000 200.00"),
    ],
)
def test_osus_sizes_and_numbers(collective, heads, cells):
    """A rank's block where blocks are moved; latencies over the ranks; bandwidths of pairs."""
    ranks_us = (1.0, 2.0, 3.0, 4.0) if heads == LATENCIES else ()
    lines = osu([result("native", [5.0] * 3, collective=collective, ranks_us=ranks_us)])
    _, head, row = lines.splitlines()
    assert " ".join(head.split()).startswith(f"# Size {heads} Iterations")
    assert " ".join(row.split()).startswith(f"{cells} 30 Pass")
