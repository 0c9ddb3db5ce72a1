"""Contents of the documents, taken apart: links, headings, snippets, commands."""

import argparse
import io
import re
import shlex
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest.mock import patch

from collectives.__main__ import main
from mpitrain.commands import arguments

ROOT = Path(__file__).parents[1]
_NAMES = "README.md CONTRIBUTING.md CHANGELOG.md jobs/README.md benchmarks/README.md"
DOCUMENTS = [
    *(ROOT / name for name in _NAMES.split()),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "mpitrain/commands/pages").glob("*.md")),
]
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
#: ``$``, ``#`` of root, and both with the machine's name before.
_PROMPT = re.compile(r"^\w*[$#] +")
#: In a sentence: what begins like this, in backquotes, is a command.
_INLINE = re.compile(r"(sudo )?(make|mpirun|python -m|mpitrain|collectives|sbatch|bash) [^`]+")


def prose(path: Path) -> str:
    """A document without its blocks of code."""
    return _FENCE.sub("", path.read_text())


def blocks(path: Path) -> list[tuple[str, str]]:
    """The blocks of code, each with the name of its language."""
    return _FENCE.findall(path.read_text())


def links(path: Path) -> list[str]:
    """The targets of all links and images."""
    return re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`]*`", "", prose(path)))


def anchors(path: Path) -> set[str]:
    """The headings of a document as links name them."""
    headings = re.findall(r"^#+ (.+)$", prose(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", text).strip().lower().replace(" ", "-") for text in headings}


def snippets(path: Path) -> Iterator[tuple[int, str]]:
    """Python in a document, with its line."""
    text = path.read_text()
    for found in _FENCE.finditer(text):
        if found[1] == "python":
            yield text.count("\n", 0, found.start()) + 2, found[2]


def commands(path: Path) -> Iterator[list[str]]:
    """Every command, as words: of consoles, of sentences, and of comments in job files."""
    if path.suffix == ".toml":
        for line in re.findall(r"^#\s{3,}((?:mpirun|python|mpitrain) .+)$", path.read_text(), re.M):
            yield from words_of(line)
        return
    for language, block in blocks(path):
        if language in ("console", "bash"):
            for line in block.replace("\\\n", " ").splitlines():
                if _PROMPT.match(line) or language == "bash":
                    yield from words_of(_PROMPT.sub("", line))
    for paragraph in prose(path).split("\n\n"):
        for text in re.findall(r"`([^`]+)`", paragraph.replace("\n", " ")):
            if _INLINE.fullmatch(text) and not re.search(r"\.\.\.| \| ", text):
                yield from words_of(text)


def words_of(line: str) -> Iterator[list[str]]:
    """The words of each command of a line, without comments."""
    scanner = shlex.shlex(line, posix=True, punctuation_chars=True)
    scanner.commenters = "#"
    scanner.whitespace_split = True
    words: list[str] = []
    for word in scanner:
        if word in ("&&", ";", "|", "||"):
            yield words
            words = []
        elif word in (">", "<"):
            next(scanner, None)  # the file
        else:
            words.append(word)
    if words:
        yield words


class _Parsed(Exception):
    """Options of a command line, taken before anything is done."""


def parse(program: str, words: list[str]) -> argparse.Namespace:
    """The options of ``collectives`` or ``mpitrain``.

    Raises:
        AssertionError: the program does not take these words.
    """
    original = argparse.ArgumentParser.parse_args

    def stop(self: argparse.ArgumentParser, *args: object) -> argparse.Namespace:
        raise _Parsed(original(self, *args))  # type: ignore[arg-type]

    told = io.StringIO()
    try:
        with (
            patch.object(argparse.ArgumentParser, "parse_args", stop),
            redirect_stderr(told), redirect_stdout(told),
        ):  # fmt: skip
            (main if program == "collectives" else arguments.parse)(words)
    except _Parsed as parsed:
        options: argparse.Namespace = parsed.args[0]
        return options
    except SystemExit as stopped:
        if stopped.code == 0:
            return argparse.Namespace()  # --help, --version
    raise AssertionError(f"{program} {shlex.join(words)}: {told.getvalue()}")


def make_targets() -> list[re.Pattern[str]]:
    """Targets that the Makefile can make."""
    rules = re.findall(r"^([\w %-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    return [re.compile(name.replace("%", r"\w+")) for rule in rules for name in rule.split()]


def make_variables() -> set[str]:
    """Variables of make's command line."""
    text = (ROOT / "Makefile").read_text()
    return {
        *re.findall(r"^(\w+) +[?:]=", text, re.MULTILINE),
        *re.findall(r"\$\(if \$\((\w+)\)", text),
    }
