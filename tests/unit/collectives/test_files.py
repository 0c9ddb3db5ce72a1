"""Files that are replaced as a whole."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from collectives.files import replace

ROOT = Path(__file__).parents[3]


def test_a_file_is_replaced_and_nothing_else_is_left(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("before")
    with path.open() as reader:
        replace(path, "after\r\n")
        assert reader.read() == "before"
    assert path.read_bytes() == b"after\r\n"
    (tmp_path / "link").symlink_to(path)
    replace(tmp_path / "link", "by a link")
    assert path.read_text() == "by a link" and (tmp_path / "link").is_symlink()
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask()
    assert sorted(os.listdir(tmp_path)) == ["a.txt", "link"]


def umask():
    found = os.umask(0)
    os.umask(found)
    return found


def test_a_file_that_cannot_be_written_is_left_as_it_was(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("before")
    with pytest.raises(UnicodeEncodeError):
        replace(path, "\ud800")
    assert path.read_text() == "before" and os.listdir(tmp_path) == ["a.txt"]
    with pytest.raises(FileNotFoundError) as caught:
        replace(tmp_path / "none" / "a.txt", "")
    assert caught.value.filename == str(tmp_path / "none" / "a.txt")


def test_a_private_file_stays_private(tmp_path):
    path = tmp_path / ("long" * 60)
    path.write_text("before")
    path.chmod(0o600)
    replace(path, "after")
    assert path.read_text() == "after" and path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"])
def test_standard_output_keeps_what_it_has(tmp_path, name):
    path = tmp_path / "log"
    path.write_text("before\n")
    code = f"from collectives.files import *; replace(Path({name!r}), 'told\\n')"
    with path.open("a") as log:
        subprocess.run([sys.executable, "-c", code], stdout=log, check=True, cwd=ROOT)
    assert path.read_text() == "before\ntold\n"


def test_a_link_to_itself_becomes_a_file(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "link")
    replace(tmp_path / "link", "told")
    assert (tmp_path / "link").read_text() == "told"


def test_what_is_no_ordinary_file_is_written_to(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    code = f"from pathlib import Path; print(Path({str(tmp_path / 'pipe')!r}).read_text())"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as reader:
        replace(tmp_path / "pipe", "told")
        assert reader.communicate(timeout=30)[0] == b"told\n"
    assert (tmp_path / "pipe").is_fifo()
