"""``mpitrain methods``: methods that can be combined, and why the others cannot."""

import argparse
from collections.abc import Sequence
from importlib.resources import files
from itertools import product
from typing import TYPE_CHECKING

from collectives.errors import hint
from mpitrain.config import ConfigError
from mpitrain.config.conflicts import combined, refusals, tables_of, uses
from mpitrain.config.method_table import METHODS, Method
from mpitrain.config.numbers import toml
from mpitrain.config.validation import faults

if TYPE_CHECKING:
    from collectives.commands import Commands

#: Rows of the table; commands have none, because a job file does not choose them.
_ROWS = [method for method in METHODS if method.title != "this command"]


def add(commands: "Commands") -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "methods",
        help="print which methods of training can be combined, and why others cannot",
        epilog="example: %(prog)s zero pipe",
    )
    parser.add_argument(
        "names",
        nargs="*",
        metavar="METHOD",
        help="methods, or beginnings of their names or keys: print whether these go together (all)",
    )
    parser.add_argument("--markdown", action="store_true", help="print a page in Markdown")
    parser.set_defaults(act=methods)


def methods(options: argparse.Namespace) -> None:
    """Prints the table, or an answer for each combination of the named methods.

    Raises:
        ConfigError: there is no such method.
    """
    if options.markdown:
        head = (files("mpitrain.commands") / "pages/methods.md").read_text(encoding="utf-8")
        print(f"{head}\n## The table\n\n```text\n{table()}\n```")
    elif not options.names:
        print(table())
    else:
        for chosen in product(*map(_named, options.names)):
            print(f"{' + '.join(method.name for method in chosen)}: {answer(chosen)}")


def _named(name: str) -> list[Method]:
    """The method of this name, or those whose names, else whose keys begin with it."""
    known = {method.name: method for method in _ROWS}
    named = [known[name]] if name in known else [m for m in _ROWS if m.name.startswith(name)]
    if found := named or [m for m in _ROWS if any(key.startswith(name) for key in m.sets)]:
        return found
    raise ConfigError(f"there is no method {name!r}; {hint(name, known)}")


def answer(chosen: Sequence[Method]) -> str:
    """Whether a job can have some methods together: how, or why not."""
    try:
        keys = combined(chosen)
    except ValueError as error:
        return f"a job has one or the other: {error}"
    job = tables_of(keys)
    if unused := [method for method in chosen if method.sets and not uses(job, method)]:
        return f"a job has one or the other: the others take the place of {unused[0].title}"
    for place, why in (*refusals(job, *(method.name for method in chosen)), *faults(job)):
        return f"no. {place}: {why}"
    return f"yes, with {', '.join(filter(None, map(_keys, chosen)))}"


def table() -> str:
    """All methods, what each needs and lacks, and the pairs."""
    width = max(len(method.name) for method in _ROWS)
    lines = ["Methods, and the keys that choose them:", ""]
    for number, method in enumerate(_ROWS, 1):
        lines.append(f"{number:2} {method.name:<{width}} {_keys(method) or method.title}")
    lines += ["", "Pairs: . go together, x do not, / exclude each other by their keys", ""]
    lines += [
        " " * (width + 4) + "".join(str(number // 10) for number in range(1, len(_ROWS) + 1)),
        " " * (width + 4) + "".join(str(number % 10) for number in range(1, len(_ROWS) + 1)),
    ]
    for number, method in enumerate(_ROWS, 1):
        marks = "".join(_mark(answer((method, other))) for other in _ROWS[: number - 1])
        lines.append(f"{number:2} {method.name:<{width}} {marks}")
    lines += ["", "What methods need, and which do not offer it:", ""]
    for need in dict.fromkeys(need for method in METHODS for need in method.needs):
        needing = ", ".join(method.name for method in METHODS if need in method.needs)
        lines += [need, f"  needed by: {needing}"]
        lines += [f"  {m.name} {m.lacks[need]}" for m in METHODS if need in m.lacks]
    return "\n".join(lines)


def _keys(method: Method) -> str:
    return ", ".join(f"{key} = {toml(value)}" for key, value in method.sets.items())


def _mark(text: str) -> str:
    return {"yes": ".", "no.": "x"}.get(text[:3], "/")
