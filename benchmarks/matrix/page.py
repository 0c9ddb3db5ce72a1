"""The page of a matrix: for each job and link, losses against seconds, and a table with bytes.

It needs no network and no script.
"""

import math
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from benchmarks.matrix import curves
from benchmarks.matrix.results import DENSE, Cell, Matrix, Result, first, in_order
from mpitrain.metrics.words import in_words
from mpitrain.report.facts import duration, number
from mpitrain.report.page import STYLE

Row = tuple[Cell, Result]

_LIGHT = (
    "var(--ink)", "#0072b2", "#c2410c", "#00805a", "#b4457a", "#a16207", "#0e7490", "#7a3fb5",
    "#8c564b", "#4d7c0f", "#9f1239", "#475569",
)  # fmt: skip
_DARK = (
    "var(--ink)", "#5db3ee", "#f2995c", "#4fcf9f", "#e78bb5", "#e0b84c", "#5cd0e0", "#c39bf0",
    "#cf9d90", "#a5d65c", "#fb7f98", "#a9b6c6",
)  # fmt: skip
_STYLE = (
    STYLE
    + ":root {" + "".join(f"--series{i}: {c};" for i, c in enumerate(_LIGHT)) + "}"
    + "@media (prefers-color-scheme: dark) { :root {"
    + "".join(f"--series{i}: {c};" for i, c in enumerate(_DARK)) + "} }"
    + "td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; } "
    + ".cells td { white-space: nowrap; } .cells th { overflow-wrap: normal; } "
    + "tr.first td { font-weight: 600; } h3 { font-size: 1rem; margin: 1.6rem 0 .3rem; }"
)  # fmt: skip
_HEADS = (
    "method", "algorithm", "layout", "to the loss", "than dense", "loss, equal steps",
    "loss, equal time", "test loss", "a step", "encoded", "sent", "sums", "codes", "waits",
)  # fmt: skip
#: Columns from here on are of numbers.
_WORDS = 3


def write_page(matrix: Matrix, path: Path) -> None:
    """Write the page.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: it cannot be written.
    """
    jobs = in_order(cell.job for cell, _ in matrix.rows())
    parts = [
        f"<h1>What pays on which link, {matrix.ranks} ranks</h1>",
        f'<p class="answer">{escape(_answer(matrix, jobs))}</p>',
        *(_of_job(matrix, job) for job in jobs),
        _left_out(matrix),
        _how(matrix),
    ]
    path.write_text(
        "<!doctype html><html lang=en><meta charset=utf-8>"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>What pays on which link</title><style>{_STYLE}</style>{''.join(parts)}</html>",
        encoding="utf-8",
    )


def verdict(rows: Sequence[Row], target: float, limit: float) -> str:
    """Sentence on the run that reaches the loss first, its gain over the best dense run, and why.

    Args:
        rows: rows of one job and link, in one layout.
        target: the loss.
        limit: seconds of a run.
    """
    dense = [row for row in rows if row[0].method == DENSE]
    if not dense:
        return "There is no dense run to compare with."
    link = rows[0][0].link
    best, least = first(rows, target), first(dense, target)
    if best is None:
        return f"On {link}, no run comes to a loss of {number(target)} in {duration(limit)}."
    cell, result = best
    seconds = result.seconds_to(target)
    if cell.method == DENSE:
        others = [row for row in rows if row[0].method != DENSE]
        next_one = first(others, target)
        behind = "and no other method comes there"
        if next_one:
            later, its = next_one[1].seconds_to(target), next_one[1]
            behind = (
                f"before {next_one[0].method} in {duration(later)}, which spends "
                f"{its.codec_share:.0%} of its time in codes"
            )
        return (
            f"On {link}, nothing pays: a dense sum by {cell.algorithm} comes to a loss of "
            f"{number(target)} first, in {duration(seconds)}, {behind}."
        )
    beside = (least or min(dense, key=lambda row: row[1].seconds_a_step))[1]
    why = (
        f"a rank sends {in_words(result.moved_bytes)} a step, not {in_words(beside.moved_bytes)}, "
        f"and a step takes {duration_ms(result.seconds_a_step)}, not "
        f"{duration_ms(beside.seconds_a_step)}"
    )
    if least is None:
        return (
            f"On {link}, {cell.method} comes to a loss of {number(target)} in {duration(seconds)}, "
            f"and no dense sum does in {duration(limit)}: {why}."
        )
    ratio = least[1].seconds_to(target) / seconds
    return (
        f"On {link}, {cell.method} comes to a loss of {number(target)} {ratio:.1f} times sooner "
        f"than a dense sum by {least[0].algorithm}, in {duration(seconds)}: {why}."
    )


def gain(rows: Sequence[Row], target: float) -> float:
    """How many times sooner than the best dense run one comes to the loss; 1 if none does.

    Where no dense run comes there, the time that it was given is counted: it is more.

    Args:
        rows: rows of one job and link, in one layout.
        target: the loss.
    """
    dense = [result for cell, result in rows if cell.method == DENSE]
    best = first(rows, target)
    if not dense or best is None or best[0].method == DENSE:
        return 1.0
    taken = min(result.seconds_to(target) for result in dense)
    if math.isinf(taken):
        taken = max(result.seconds[-1] for result in dense)
    return max(1.0, taken / best[1].seconds_to(target))


def _answer(matrix: Matrix, jobs: Sequence[str]) -> str:
    """Sentence on the largest gain of all links, or that there is none."""
    every = [
        (gain(rows, matrix.target(job)), verdict(rows, matrix.target(job), matrix.limit))
        for job in jobs
        for _, rows in _by_link(matrix, job)
    ]
    # The first of equal gains counts.
    return max(every, key=lambda one: one[0])[1] if every else "Nothing was trained yet."


def duration_ms(seconds: float) -> str:
    """``3.2 ms``."""
    return f"{1e3 * seconds:.3g} ms" if math.isfinite(seconds) else "-"


def _by_link(matrix: Matrix, job: str) -> Iterable[tuple[str, Sequence[Row]]]:
    """Rows of each link in its first layout."""
    for link in in_order(cell.link for cell, _ in matrix.done(job)):
        rows = matrix.done(job, link)
        yield link, [row for row in rows if row[0].layout == rows[0][0].layout]


def _of_job(matrix: Matrix, job: str) -> str:
    target = matrix.target(job)
    parts = [f"<h2>{escape(job)}</h2>"]
    for link, of_first in _by_link(matrix, job):
        rows, text = matrix.done(job, link), verdict(of_first, target, matrix.limit)
        drawn = curves.against_seconds(_curves(matrix, rows), target)
        parts.append(f"<h3>{escape(link)}</h3><p>{escape(text)}</p>{drawn}")
        for layout in in_order(cell.layout for cell, _ in rows):
            some = [row for row in rows if row[0].layout == layout]
            table = _table(some, target, matrix.steps)
            if layout != rows[0][0].layout:
                table = f"<details><summary>{escape(layout)}</summary>{table}</details>"
            parts.append(table)
    return "".join(parts)


def _curves(matrix: Matrix, rows: Sequence[Row]) -> list[curves.Curve]:
    """Curves of the first layout; a method with several algorithms has several."""
    methods = in_order(cell.method for cell, _ in matrix.rows())
    others = [method for method in methods if method != DENSE]
    layout = rows[0][0].layout
    some = [row for row in rows if row[0].layout == layout]
    several = {c.method for c, _ in some if sum(o.method == c.method for o, _ in some) > 1}
    usual = {method: next(c for c, _ in some if c.method == method).algorithm for method in several}
    found = []
    for cell, result in some:
        label = f"{cell.method}, {cell.algorithm}" if cell.method in several else cell.method
        colour = 0 if cell.method == DENSE else 1 + others.index(cell.method) % (curves.SERIES - 1)
        dashed = usual.get(cell.method, cell.algorithm) != cell.algorithm
        found.append(curves.Curve(label, colour, dashed, result.seconds, result.smooth))
    return found


def _table(rows: Sequence[Row], target: float, steps: int) -> str:
    """By time to the loss, what does not come there last."""
    best = first(rows, target)
    dense = first([row for row in rows if row[0].method == DENSE], target)
    ends = [result.seconds[-1] for _, result in rows]
    moment = best[1].seconds_to(target) if best else min(ends)
    head = "".join(
        f"<th{' class=n' if i >= _WORDS else ''}>{escape(name)}</th>"
        for i, name in enumerate(_HEADS)
    )
    body = []
    for cell, result in sorted(rows, key=lambda row: row[1].seconds_to(target)):
        values = _values(cell, result, target, moment, steps, dense)
        told = "".join(
            f"<td{' class=n' if i >= _WORDS else ''}>{escape(value)}</td>"
            for i, value in enumerate(values)
        )
        mark = " class=first" if best and cell == best[0] else ""
        body.append(f"<tr{mark}>{told}</tr>")
    note = (
        f"Seconds to a loss of {number(target)}; equal steps: after {steps}, or as many as there "
        f"were time for; equal time: after {duration(moment)}. Encoded and sent: bytes of a step "
        "and rank; sent ones are counted. Sums, codes and waits: parts of the time; codes are a "
        "part of the sums."
    )
    table = f'<div class="scroll"><table class=cells><tr>{head}</tr>{"".join(body)}</table></div>'
    return f'{table}<p class="note">{escape(note)}</p>'


def _values(
    cell: Cell, result: Result, target: float, moment: float, steps: int, dense: Row | None
) -> list[str]:
    seconds = result.seconds_to(target)
    ratio = dense[1].seconds_to(target) / seconds if dense and math.isfinite(seconds) else math.nan
    done = len(result.losses)
    at = result.loss_at(moment)
    return [
        cell.method,
        result.algorithm or cell.algorithm,
        cell.layout,
        f"{seconds:.3g} s" if math.isfinite(seconds) else f"> {result.seconds[-1]:.3g} s",
        f"{ratio:.2f}x" if math.isfinite(ratio) else "-",
        number(result.smooth[-1]) + ("" if done >= steps else f" ({done} steps)"),
        number(at) if math.isfinite(at) else "-",
        "-" if result.test_loss is None else number(result.test_loss),
        duration_ms(result.seconds_a_step),
        in_words(result.encoded_bytes),
        in_words(result.moved_bytes),
        f"{result.comm_share:.0%}",
        f"{result.codec_share:.0%}",
        f"{result.wait_share:.0%}",
    ]


def _left_out(matrix: Matrix) -> str:
    rows = [(", ".join(c), r.state, r.why) for c, r in matrix.rows() if r.state != "done"]
    if not rows:
        return ""
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(value)}</td>' for value in row)}</tr>" for row in rows
    )
    return f'<h2>What cannot be, and why</h2><div class="scroll"><table>{body}</table></div>'


def _how(matrix: Matrix) -> str:
    software = ", ".join(f"{name} {version}" for name, version in matrix.software.items())
    rows = [
        ("command", matrix.command),
        ("date", matrix.date),
        ("ranks", str(matrix.ranks)),
        ("machine", ", ".join(f"{name}: {value}" for name, value in matrix.machine.items())),
        ("software", software),
        ("each cell", f"{matrix.steps} steps, or {matrix.limit:g} s of training"),
    ]
    methods = {cell.method: ", ".join(r.settings) for cell, r in matrix.rows() if r.settings}
    rows += methods.items()
    body = "".join(f"<tr><td>{name}</td><td>{escape(value)}</td></tr>" for name, value in rows)
    text = (
        "Links other than shared memory are made up on one machine: real messages between real "
        "ranks, which arrive after the link's latency and the time of their bytes; each rank has a "
        "link of its own. Losses are means over the last 10 steps' global batches; the loss that "
        "runs are timed to is the longest dense run's after three quarters of its steps. Tests are "
        "left out of the time. What is sent is counted in collectives, in messages or in shared "
        "memory; activations between the stages of a pipeline come on top."
    )
    return (
        f'<h2>How it was measured</h2><p>{escape(text)}</p><div class="scroll"><table>{body}'
        "</table></div>"
    )
