"""Sentences of the packages and documents whose subject is missing.

``python -m tests.prose`` prints them; ``python -m tests.prose collectives/calls docs`` reads these
folders alone.
"""

import ast
import io
import random
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.documents import DOCUMENTS, ROOT, prose

PACKAGES = ("collectives", "mpitrain")
_HEADLESS = r"(?:of|that|those|what|whose|the same|so many|as many)\b(?!:)"
_ATTRIBUTE = re.compile(rf"\*{{0,2}}[A-Za-z_]\w*(?:, \*{{0,2}}\w+)*: {_HEADLESS}", re.IGNORECASE)
_SENTENCE = re.compile(r"(?<=[.!?:])[)\"'*]* +(?=[\"'(*]*[A-Z])")
_PHRASE = re.compile(r"\b(as many as there are|what of it|(?:told|tells?) of)\b", re.IGNORECASE)
#: Keyword arguments of argparse and msgspec that a user reads.
_HELP = {"help", "description", "epilog"}


class Text(NamedTuple):
    """A paragraph that somebody reads.

    Attributes:
        path: its file.
        line: the first line of the docstring, comment or string that it is part of.
        words: the paragraph without line breaks; code is replaced by a placeholder.
    """

    path: Path
    line: int
    words: str


class Offence(NamedTuple):
    """A sentence without a subject, or one with a phrase that is not allowed."""

    path: Path
    line: int
    sentence: str

    @property
    def room(self) -> str:
        """Folder of the file, relative to the repository."""
        return str(self.path.relative_to(ROOT).parent)

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}: {self.sentence}"


def offences(folders: Sequence[str] = ()) -> Iterator[Offence]:
    """Sentences to rewrite in files and below folders; in both packages and all documents if none
    are given."""
    files = {path for name in PACKAGES for path in (ROOT / name).rglob("*.py")} | set(DOCUMENTS)
    wanted = [(ROOT / folder).resolve() for folder in folders or (".",)]
    for path in sorted(files):
        if any(path.is_relative_to(folder) for folder in wanted):
            for text in in_document(path) if path.suffix == ".md" else in_module(path):
                for sentence in bad_sentences(text.words):
                    yield Offence(path, text.line, sentence)


def bad_sentences(paragraph: str) -> Iterator[str]:
    """Sentences of a paragraph that have no subject or a phrase that is not allowed."""
    for i, sentence in enumerate(_SENTENCE.split(paragraph)):
        start = sentence.lstrip("\"'([*-: ")
        # After a colon or a full stop a capital begins a sentence; a paragraph may begin small.
        headless = re.match(_HEADLESS, start, re.IGNORECASE) and (i == 0 or start[:1].isupper())
        if headless or _ATTRIBUTE.match(start) or _PHRASE.search(sentence):
            yield sentence.strip()


def in_document(path: Path) -> Iterator[Text]:
    """Paragraphs and items of lists; questions may be headings, and tables are no sentences."""
    whole, end = path.read_text(), 0
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", prose(path)):
        start = whole.find(block, end)
        end = max(start, 0)
        stripped = re.sub(r"^\s*(?:[-*]|\d+\.) +", "", block).strip()
        if not stripped.startswith("|") and not (stripped.startswith("#") and "?" in stripped):
            yield Text(path, whole.count("\n", 0, end) + 1, _joined(stripped.lstrip("# ")))


def in_module(path: Path) -> Iterator[Text]:
    """Paragraphs of docstrings, comments, messages of raised errors and texts of help."""
    source = path.read_text()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            if isinstance(node.value.value, str):
                for words in _paragraphs(node.value.value):
                    yield Text(path, node.lineno, words)
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            for argument in node.exc.args:
                yield from _strings(path, argument)
        elif isinstance(node, ast.keyword) and node.arg in _HELP:
            yield from _strings(path, node.value)
    yield from _comments(path, source)


def _strings(path: Path, node: ast.expr) -> Iterator[Text]:
    """Texts of an expression that gives a string, with placeholders for what is filled in."""
    if isinstance(node, ast.IfExp):
        yield from _strings(path, node.body)
        yield from _strings(path, node.orelse)
    elif isinstance(node, ast.BinOp):
        yield from _strings(path, node.left)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield Text(path, node.lineno, _joined(node.value))
    elif isinstance(node, ast.JoinedStr):
        parts = (str(p.value) if isinstance(p, ast.Constant) else "X" for p in node.values)
        yield Text(path, node.lineno, _joined("".join(parts)))


def _comments(path: Path, source: str) -> Iterator[Text]:
    """Comments; those on lines of their own, one below the other, are one text."""
    block: list[str] = []
    first = last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        row, column = token.start
        alone = not token.line[:column].strip()
        words = token.string.lstrip("#:! ")
        if re.match(r"type:|noqa|fmt:|pragma", words):
            continue
        if block and alone and row == last + 1:
            block.append(words)
        else:
            yield from (Text(path, first, _joined(" ".join(block))) for _ in block[:1])
            block, first = [words], row
        last = row if alone else 0
    yield from (Text(path, first, _joined(" ".join(block))) for _ in block[:1])


def _paragraphs(docstring: str) -> Iterator[str]:
    """Paragraphs, items and attributes of a docstring, without its examples."""
    text = re.sub(
        r"^( *)(.*)::\n(?:\n|\1 +.*\n)*", r"\1\2\n\n", docstring + "\n", flags=re.MULTILINE
    )
    text = re.sub(r"^\s*>>>.*$", "", text, flags=re.MULTILINE)
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*] |\*{0,2}\w+(?:, \*{0,2}\w+)*: ))", text):
        if words := _joined(block):
            yield words


def _joined(text: str) -> str:
    """One line; code in backquotes is a word."""
    return re.sub(r"\s+", " ", re.sub(r"`+[^`]+`+", "X", text)).strip()


def drawn(before: Path, after: Path, number: int = 20, seed: int = 35) -> Iterator[str]:
    """First sentences of docstrings that two checkouts have by one name, and say differently."""
    old, new = (_first_sentences(root) for root in (before, after))
    names = sorted(name for name in old.keys() & new.keys() if old[name] != new[name])
    for name in random.Random(seed).sample(names, min(number, len(names))):
        yield f"{name}\n  before: {old[name]}\n  after:  {new[name]}"


def _first_sentences(root: Path) -> dict[str, str]:
    """By class and function; names that stand more than once are left out."""
    found: dict[str, list[str]] = {}
    for package in ("collectives", "mpitrain"):
        for path in (root / package).rglob("*.py"):
            classes = [n for n in ast.walk(ast.parse(path.read_text())) if type(n) is ast.ClassDef]
            for one in classes:
                for node in (one, *(n for n in one.body if isinstance(n, ast.FunctionDef))):
                    name = one.name if node is one else f"{one.name}.{node.name}"
                    if text := ast.get_docstring(node):
                        found.setdefault(name, []).append(re.split(r"(?<=\.)\s|\n\n", text)[0])
    return {name: " ".join(one[0].split()) for name, one in found.items() if len(one) == 1}


def main(arguments: list[str]) -> int:
    """Print the offences and their number in each room; 1 where there is one.

    With ``--drawn BEFORE AFTER``, print twenty sentences of two checkouts instead.
    """
    if arguments[:1] == ["--drawn"]:
        print(*drawn(Path(arguments[1]), Path(arguments[2])), sep="\n")
        return 0
    found = list(offences(arguments))
    for offence in found:
        print(offence)
    for room, count in sorted(Counter(offence.room for offence in found).items()):
        print(f"{count:6} {room}", file=sys.stderr)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
