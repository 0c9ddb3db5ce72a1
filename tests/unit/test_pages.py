"""The pages in a real browser: keys are pressed, and the text is compared with the proof."""

import pytest

from collectives.algorithms import build
from collectives.analysis.explore import record
from collectives.commands.explore import explorer
from tests.browser import browser
from tests.unit.collectives.test_explore import spelled, states

WIDTHS = {390: 844, 1600: 1000}


@pytest.fixture(scope="module")
def window(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


def opened(window, path, page, place=""):
    path.write_text(page, encoding="utf-8")
    window.log("browser"), window.requests()
    window.open(f"{path.as_uri()}{place}")
    return path.as_uri()


def labels(window, view=0):
    """The text of every cell that holds something, as a screen reader says it."""
    code = f"""return [...document.querySelectorAll(".view")[{view}].querySelectorAll("td")]
        .map(td => [td.dataset.at, td.getAttribute("aria-label")])"""
    found = {}
    for place, label in window.script(code):
        text = label.split(": ")[1].removesuffix(", the result")
        if text != "empty":
            found[tuple(map(int, place.split(".")))] = text
    return found


def told(collective, name, size):
    """Texts that the page must say after each round."""
    data = record(build(collective, name, size))
    return [
        {cell: spelled(data["nodes"], node) for cell, node in state.items()}
        for state in states(data)
    ]


def is_clean(window, address):
    """No complaint, nothing loaded but the page, nothing wider than the window."""
    assert [entry["message"] for entry in window.log("browser")] == []
    assert {url.partition("#")[0] for url in window.requests()} <= {address}
    wide, inner = window.script(
        "return [document.documentElement.scrollWidth, document.documentElement.clientWidth]"
    )
    assert wide <= inner


@pytest.mark.parametrize("width", WIDTHS)
def test_two_algorithms_are_stepped_through_by_key(window, tmp_path, width):
    window.resize(width, WIDTHS[width], mobile=width < 600)
    page = explorer("allreduce", ["ring", "swing"], [4, 8])
    address = opened(window, tmp_path / "page.html", page, "#ranks=8&round=2")
    ring, swing = told("allreduce", "ring", 8), told("allreduce", "swing", 8)
    keys = {"ArrowRight": 3, "ArrowLeft": 2, "End": 14, "PageUp": 13, "5": 5}
    for key, step in keys.items():
        window.press(key)
        assert labels(window, 0) == ring[step]
        assert labels(window, 1) == swing[min(step, len(swing) - 1)]
        assert f"round={step}" in window.script("return location.hash")
    assert "round 4: 8 messages of 1 chunk, from each rank r to rank r+1 (mod 8), added" in (
        window.script("return document.querySelector('#said').textContent.toLowerCase()")
    )
    window.press("Home")
    assert labels(window) == ring[0]
    window.tap('td[data-at="3.0.5"]')
    assert window.script("return document.querySelector('.expression').textContent") == "r3"
    is_clean(window, address)


def test_a_cell_tells_its_sum_and_who_wrote_it(window, tmp_path):
    window.resize(1600, 1000)
    page = explorer("allreduce", ["ring"], [8, 16])
    address = opened(window, tmp_path / "page.html", page, "#ranks=8&round=4")
    window.point('td[data-at="2.1.5"]')
    why = window.script("return document.querySelector('.why').textContent")
    assert told("allreduce", "ring", 8)[4][2, 1, 5] in why
    assert "rank 1 sends recvbuf[5] to rank 2, which adds its sendbuf[5]" in why
    assert window.script("return document.querySelector('td.from').dataset.at") == "1.1.5"
    window.press("ArrowDown")
    window.press("Shift", "ArrowRight")
    assert window.script("return document.querySelector('td.chosen').dataset.at") == "3.1.6"
    assert "cell=3.1.6" in window.script("return location.hash")
    window.script(
        "document.querySelector('#ranks').value = 16; document.querySelector('#ranks').onchange()"
    )
    window.press("9")
    assert labels(window) == told("allreduce", "ring", 16)[9]
    is_clean(window, address)
