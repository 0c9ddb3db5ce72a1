"""One HTML file that needs no network: a template with its styles, scripts and data in it."""

import json
import re
from html import escape
from importlib.resources import files
from operator import index
from typing import Any


def fill(package: str, name: str, title: str, data: Any) -> str:
    """The template ``pages/<name>`` of a package, filled in.

    ``{{title}}`` and ``{{data}}``, as JSON, are replaced, and ``{{style.css}}`` by the file of this
    name in the package's folder ``pages``, or in that of this package.
    """

    def part(found: re.Match[str]) -> str:
        key = found[1]
        if key == "title":
            return escape(title)
        if key == "data":  # nothing in it may end the element that holds it
            # A program's own algorithm may have NumPy's integers in its steps.
            return json.dumps(data, separators=(",", ":"), default=index).replace("<", "\\u003c")
        own = files(package) / "pages" / key
        path = own if own.is_file() else files(__package__) / "pages" / key
        return path.read_text(encoding="utf-8")

    page = (files(package) / "pages" / name).read_text(encoding="utf-8")
    return re.sub(r"\{\{([\w.]+)\}\}", part, page)
