"""Processes of this machine, by their numbers."""

import subprocess
import sys

import pytest

from collectives.failure.abort import _kill
from collectives.failure.processes import find

NAMED = "import sys; open('/proc/self/comm', 'wb').write({!r}); print(flush=True); sys.stdin.read()"


@pytest.mark.parametrize("name", ["trainiere-größe.py".encode()[:15], b"a) b (c", b"\xff) 1 2"])
@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_a_process_of_any_name_is_found_and_killed(name, locale, monkeypatch):
    """The kernel cuts names at 15 bytes, as here within a letter."""
    monkeypatch.setenv("LC_ALL", locale)
    words = [sys.executable, "-c", NAMED.format(name)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        found = find(process.pid)
        assert (found.number, found.name) == (process.pid, name.decode(errors="replace"))
        subprocess.run(["sh", "-c", _kill(found)], check=True)
        process.stdin.close()
        assert process.wait() == -9
