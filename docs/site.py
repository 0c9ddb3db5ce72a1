"""Hooks of mkdocs: pages that commands print, the API, files outside of docs/, and their links."""

import ast
import re
import tempfile
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path, PurePosixPath
from posixpath import normpath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url

from collectives.__main__ import main as run_collectives
from mpitrain.__main__ import main as run_mpitrain

ROOT = Path(__file__).parents[1]
#: Pages of the site that are files outside of docs/.
OUTSIDE = {
    "index.md": "README.md",
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "jobs.md": "jobs/README.md",
}
#: Pages that commands print: the file of their introduction, which links name, and the command.
PRINTED = {
    "job.md": ("mpitrain/commands/pages/job.md", ["keys", "--markdown"]),
    "methods.md": ("mpitrain/commands/pages/methods.md", ["methods", "--markdown"]),
}
#: Pages of the API: packages whose public names each page has.
API = {
    "api/collectives.md": ("collectives", "collectives.schedule"),
    "api/mpitrain.md": ("mpitrain", "mpitrain.adapters.torch", "mpitrain.nn"),
}
#: Explorers by their file: a title and the command that writes it, but for the file's name.
EXPLORERS = {
    "ring": ("Ring beside Swing", "explore allreduce ring --with swing -n 4,8 -o"),
    "tree": ("Double binary tree", "explore allreduce double_binary_tree:segments=4 -n 7,8 -o"),
    "bruck": ("Bruck's all-to-all", "explore alltoall bruck -n 5,8 -o"),
}
_LINK = re.compile(r"(\]\()(?!\w+:|#)([^)#\s]+)")
#: A link that is named by the file that it leads to.
_BY_FILE = re.compile(r"\[[\w./-]+\.md\](?=\((?!\w+:)([^)#\s]+))")
#: A line of code that is wider than a page, and the comment behind it.
_WIDE = re.compile(r"^(?=.{74})([^#\n]*\S) +# (.+)$", re.MULTILINE)
_BLOCK = re.compile(r"^```\w*\n.*?^```$", re.MULTILINE | re.DOTALL)
_ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod|obj):<code>~?(?:[\w.]+\.)?(\w+)</code>")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that are not in docs/."""
    pages = {page: (ROOT / path).read_text() for page, path in OUTSIDE.items()}
    for page, modules in API.items():
        pages[page] = "\n".join([f"# API of {modules[0]}\n", *map(_api, modules)])
    for page, (_, command) in PRINTED.items():
        with redirect_stdout(StringIO()) as printed:
            assert run_mpitrain(command) == 0
        pages[page] = printed.getvalue()
    pages["explore.md"] = _explorers()
    for path in _linked_files():
        pages[_page_of(path)] = f"# {path}\n\n```python\n{(ROOT / path).read_text()}```\n"
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    with tempfile.TemporaryDirectory() as folder:
        for name, (_, command) in EXPLORERS.items():
            path = Path(folder) / f"{name}.html"
            with redirect_stdout(StringIO()):
                assert run_collectives([*command.split(), str(path)]) == 0
            files.append(File.generated(config, f"explore/{name}.html", content=path.read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Leads links between files of the repository to their pages, and names them by these; puts
    comments of wide lines of code above them."""
    name = page.file.src_uri
    if "/" in name or name == "explore.md":
        return markdown
    titles = {file: title for part in config.nav for title, file in _entries(part)}
    folder = PurePosixPath(OUTSIDE.get(name, f"docs/{name}")).parent

    def lead(found: re.Match[str]) -> str:
        return found[1] + _page_of(normpath(str(folder / found[2])))

    def call(found: re.Match[str]) -> str:
        return f"[{titles.get(_page_of(normpath(str(folder / found[1]))), found[1])}]"

    markdown = _BLOCK.sub(lambda block: _WIDE.sub(_above, block[0]), markdown)
    return _LINK.sub(lead, _BY_FILE.sub(call, markdown))


def _entries(part: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Titles and files of a part of the menu."""
    for title, below in part.items():
        if isinstance(below, str):
            yield title, below
            continue
        for one in below:
            yield from _entries(one)


def _above(found: re.Match[str]) -> str:
    """A line of code below its comment, behind the same spaces or prompt."""
    before = re.match(r"[\w-]*\$ | *", found[1])
    return f"{before[0] if before else ''}# {found[2]}\n{found[1]}"


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Shows Sphinx's roles of docstrings as code."""
    return _ROLE.sub(r"<code>\1</code>", html)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Takes the script by which pages on disk are searched from the site, not from another host."""
    own = get_relative_url("figures/worker.js", page.url)
    return output.replace("https://unpkg.com/iframe-worker/shim", own)


def _page_of(path: str) -> str:
    """Page of a file of the repository."""
    pages = {outside: page for page, outside in OUTSIDE.items()}
    pages |= {head: page for page, (head, _) in PRINTED.items()}
    if path in pages:
        return pages[path]
    return path.removeprefix("docs/") if path.startswith("docs/") else f"source/{path}.md"


def _linked_files() -> set[str]:
    """Files of code that documents link to, relative to the repository."""
    found = set()
    for path in [*(ROOT / "docs").glob("*.md"), *(ROOT / path for path in OUTSIDE.values())]:
        for _, target in _LINK.findall(path.read_text()):
            linked = (path.parent / target).resolve()
            if linked.suffix == ".py":
                found.add(str(linked.relative_to(ROOT)))
    return found


def _api(module: str) -> str:
    """Section with the public names of a package, or with a whole module; imports nothing."""
    path = ROOT / module.replace(".", "/") / "__init__.py"
    if not path.exists():
        return f"## `{module}`\n\n::: {module}\n    options: {{show_root_heading: false}}\n"
    tree = ast.parse(path.read_text())
    names = next(
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    parts = [f"## `{module}`\n", f"{ast.get_docstring(tree)}\n"]
    parts += [f"::: {module}.{name}\n" for name in names if name != "__version__"]
    return "\n".join(parts)


def _explorers() -> str:
    """Page with links to the explorers, and the commands that write them."""

    def rows() -> Iterator[str]:
        for name, (title, command) in EXPLORERS.items():
            yield f"| [{title}](explore/{name}.html) | `collectives {command} FILE` |"

    return (
        "# Explorers\n\nPages that step through the rounds of an algorithm."
        "\n\n| page | written by |\n| --- | --- |\n" + "\n".join(rows()) + "\n"
    )
