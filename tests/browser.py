"""A headless browser, driven over the WebDriver protocol with the standard library alone."""

import json
import shutil
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.processes import until

FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
FLAGS += ["--disable-component-update", "--disable-sync", "--no-first-run", "--hide-scrollbars"]
#: Keys by the names that pages know them by, as WebDriver spells them.
KEYS = {
    "Shift": "\ue008", "PageUp": "\ue00e", "End": "\ue010", "Home": "\ue011", "ArrowLeft": "\ue012",
    "ArrowRight": "\ue014", "ArrowDown": "\ue015",
}  # fmt: skip
_SECONDS = 60.0


class Browser:
    """One window; ``script`` is JavaScript that ends with ``return``."""

    def __init__(self, address: str) -> None:
        self._address = address

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """The browser's answer to one command."""
        data = json.dumps(body or {}).encode() if method == "POST" else None
        request = urllib.request.Request(self._address + path, data, method=method)
        try:
            with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(json.load(error)["value"]["message"]) from None

    def open(self, url: str) -> None:
        """Loads a page."""
        self.ask("POST", "/url", {"url": url})

    def script(self, code: str) -> Any:
        """Value of a piece of JavaScript."""
        return self.ask("POST", "/execute/sync", {"script": code, "args": []})

    def press(self, *keys: str) -> None:
        """Presses keys together, as ``press("Shift", "ArrowRight")``."""
        typed = [KEYS.get(key, key) for key in keys]
        events = [{"type": "keyDown", "value": key} for key in typed]
        events += [{"type": "keyUp", "value": key} for key in reversed(typed)]
        self.ask("POST", "/actions", {"actions": [{"type": "key", "id": "k", "actions": events}]})

    def point(self, selector: str) -> None:
        """Moves the mouse to the middle of the first element of a CSS selector."""
        move = {"type": "pointerMove", "duration": 0, "x": 0, "y": 0}
        mouse = {"type": "pointer", "id": "m", "actions": [move | {"origin": self._seen(selector)}]}
        self.ask("POST", "/actions", {"actions": [mouse]})

    def tap(self, selector: str) -> None:
        """Clicks on the first element of a CSS selector."""
        (number,) = self._seen(selector).values()
        self.ask("POST", f"/element/{number}/click")

    def _seen(self, selector: str) -> dict[str, str]:
        """The element, scrolled to the middle of the window."""
        self.script(f"document.querySelector({selector!r}).scrollIntoView({{block: 'center'}})")
        return self.ask("POST", "/element", {"using": "css selector", "value": selector})

    def resize(self, width: int, height: int, mobile: bool = False) -> None:
        """A window of ``width`` CSS pixels, narrower than a desktop's if ``mobile``."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": mobile}
        command = {"cmd": "Emulation.setDeviceMetricsOverride", "params": metrics}
        self.ask("POST", "/goog/cdp/execute", command)

    def log(self, kind: str) -> list[dict[str, Any]]:
        """Entries logged since the last call: ``"browser"`` or ``"performance"``."""
        return self.ask("POST", "/se/log", {"type": kind})

    def requests(self) -> list[str]:
        """Addresses that pages have asked for since the last call."""
        events = [json.loads(entry["message"])["message"] for entry in self.log("performance")]
        sent = [event for event in events if event["method"] == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in sent]


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """A browser whose profile is in ``folder``; skips the test where there is none."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if not (chromium and driver):
        pytest.skip("needs chromium and chromedriver: apt-get install chromium chromium-driver")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen([driver, f"--port={port}"], **quiet)
    try:
        root = Browser(f"http://127.0.0.1:{port}")
        assert until(lambda: _is_ready(root), _SECONDS), "chromedriver does not answer"
        options = {"binary": chromium, "args": [*FLAGS, f"--user-data-dir={folder}"]}
        logs = {"browser": "ALL", "performance": "ALL"}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": logs}
        session = root.ask("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        found = Browser(f"http://127.0.0.1:{port}/session/{session['sessionId']}")
        try:
            yield found
        finally:
            found.ask("DELETE", "")
    finally:
        process.terminate()
        process.wait()


def _is_ready(root: Browser) -> bool:
    try:
        return root.ask("GET", "/status")["ready"]
    except (urllib.error.URLError, ConnectionError):
        return False
