"""``mpitrain keys``: the tables and keys of a job file, in the terminal, as lines and as a page."""

import re
from collections.abc import Iterable
from importlib.resources import files

from rich.console import Console, Group
from rich.table import Table as Grid
from rich.text import Text

from collectives.errors import hint
from mpitrain.config import ConfigError
from mpitrain.config.keys import Key, Table, tables

#: Columns of what stands on the left in a terminal.
_LEFT = 30


def keys(name: str | None, *, as_markdown: bool = False) -> None:
    """Prints tables or a key: laid out in a terminal, and elsewhere a line for each key.

    Args:
        name: name of a table or of a key, as ``"optim"``, ``"optim.lr"`` or ``"lr"``; None: all.
        as_markdown: prints all tables as a page in Markdown, with its introduction.

    Raises:
        ConfigError: there is no such table or key.
    """
    chosen = _chosen(name)
    if as_markdown:
        print(page(chosen) if name is None else "\n".join(map(_section, chosen)), end="")
        return
    console = Console(highlight=False, markup=False)
    if console.is_terminal:
        console.print(Group(*map(_grid, chosen)))
        return
    for table in chosen:
        for key in table.keys:
            print(f"{table.name}.{_assigned(key)} ({key.values}): {key.text}")


def page(chosen: Iterable[Table]) -> str:
    """The page of all tables, behind its introduction."""
    head = (files("mpitrain.commands") / "pages/job.md").read_text(encoding="utf-8")
    return _linked(head) + "".join(f"\n{_section(table)}" for table in chosen)


def _chosen(name: str | None) -> list[Table]:
    found = tables()
    if name is None:
        return found
    asked = name.strip("[]")
    if whole := [table for table in found if table.name in (asked, f"{asked}.groups")]:
        return whole
    named = [(t, [k for k in t.keys if asked in (k.name, f"{t.name}.{k.name}")]) for t in found]
    if chosen := [table._replace(text=[], keys=keys) for table, keys in named if keys]:
        return chosen
    known = [f"{t.name}.{k.name}" for t in found for k in t.keys] if "." in asked else []
    known += [table.name for table in found]
    raise ConfigError(f"a job file has no table or key {asked!r}; {hint(asked, known)}")


def _assigned(key: Key) -> str:
    """``lr = 0.05``; of a key without a default its name."""
    return f"{key.name} = {key.default}" if key.default else key.name


def _grid(table: Table) -> Group:
    """For a terminal: on the left a key and what it takes, on the right its meaning."""
    grid = Grid(box=None, show_header=False, pad_edge=False, padding=(0, 2, 1, 0))
    grid.add_column(width=_LEFT, overflow="fold")
    grid.add_column(overflow="fold")
    for key in table.keys:
        left = Text(_assigned(key), style="bold")
        grid.add_row(left.append(f"\n{key.values}", style="not bold dim"), Text(key.text))
    return Group(Text(table.header, style="bold reverse"), *map(Text, (*table.text, "")), grid)


def _section(table: Table) -> str:
    """In Markdown."""
    lines = [f"### {table.header}", ""]
    for text in table.text:
        lines += [_linked(text), ""]
    lines += ["| key | default | values | meaning |", "| --- | --- | --- | --- |"]
    for key in table.keys:
        default = f"`{key.default}`" if key.default else ""
        cells = (f"`{key.name}`", default, _coded(key.values), _linked(key.text))
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines) + "\n"


def _coded(values: str) -> str:
    """Choices as code, and words as they are."""
    return re.sub(r'"[^"]*"|true|false', r"`\g<0>`", values)


def _linked(text: str) -> str:
    """A link to each document of the same folder."""
    return re.sub(r"docs/(\w+\.md)", r"[\1](\1)", text)
