"""``explore``: a schedule as one HTML file, to step through its rounds."""

import argparse
import re
from pathlib import Path

from collectives.algorithms import build
from collectives.analysis.explore import MOST_RANKS, record
from collectives.analysis.page import fill
from collectives.analysis.user_code import resolve
from collectives.commands.arguments import add_drawn, add_ranks, drawn
from collectives.commands.program import Commands
from collectives.contracts import contract
from collectives.errors import CollectiveError
from collectives.files import replace


def add(commands: Commands) -> None:
    """Adds ``explore``."""
    exploring = commands.add_parser(
        "explore",
        help="write an HTML page that steps through the rounds of an algorithm",
        description="Write one HTML file, which needs no network, that steps through the rounds of "
        "an algorithm and shows what every chunk holds after each, and what was added in which "
        f"order; up to {MOST_RANKS} ranks.",
        epilog="example: python -m collectives explore allreduce ring --with swing -n 4,8,16",
    )
    add = exploring.add_argument
    add_drawn(exploring)
    beside = "a second algorithm, side by side and in step"
    add("--with", dest="beside", metavar="ALGORITHM", help=beside)
    add_ranks(exploring, "8")
    add("--root", type=int, default=0, help="root of a broadcast, reduce, gather or scatter (0)")
    add("--in-place", action="store_true", help="with the input in recvbuf, as MPI.IN_PLACE")
    add("-o", "--output", type=Path, help="HTML file to write (COLLECTIVE_ALGORITHM.html)")
    exploring.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Writes the page."""
    collective, algorithm = drawn(options)
    names = [resolve(name) for name in (algorithm, options.beside) if name]
    page = explorer(collective, names, options.ranks, options.root, options.in_place)
    plain = re.sub(r"\W+", "_", "_".join(names))
    path = options.output or Path(f"{collective}_{plain}.html")
    path.parent.mkdir(parents=True, exist_ok=True)
    replace(path, page)
    print(f"wrote {path}")
    return 0


def explorer(
    collective: str, names: list[str], sizes: list[int], root: int = 0, in_place: bool = False
) -> str:
    """The page of one algorithm, or of two side by side, for each of ``sizes`` ranks.

    Raises:
        CollectiveError: the algorithm or the root does not exist, or the algorithm is wrong or too
            large for a page.
    """
    sizes = sorted(set(sizes))
    if not 0 <= root < sizes[0]:
        raise CollectiveError(
            f"root {root} must lie in 0..{sizes[0] - 1}, as there are {sizes[0]} ranks"
        )
    if root and not contract(collective).rooted:
        raise CollectiveError(f"{collective} has no root; leave --root out")
    runs = [
        {
            "name": name,
            "runs": {size: record(build(collective, name, size, root), in_place) for size in sizes},
        }
        for name in names
    ]
    what = collective + (" in place" if in_place else "")
    title = f"{what}: {' beside '.join(names)}"
    data = {"title": title, "sizes": sizes, "algorithms": runs}
    return fill("collectives.analysis", "explore.html", title, data)
