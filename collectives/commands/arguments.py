"""Types of command-line arguments that several commands share."""

import argparse
import math
import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from collectives import extras
from collectives.algorithms import ALGORITHMS
from collectives.contracts import CONTRACTS, MOST_RANKS
from collectives.errors import UnknownAlgorithm

if TYPE_CHECKING:
    from collectives.analysis.topology import Topology


#: Names of networks, as of :data:`collectives.analysis.topology.TOPOLOGIES`.
TOPOLOGIES = ("flat", "fat-tree", "cluster", "dgx1", "ring", "torus2d", "torus3d")
#: GB/s of a port in one direction, by its network's name.
NETWORKS = {"10gbe": 1.25, "100gbe": 12.5, "edr": 12.5, "hdr": 25.0, "ndr": 50.0}
#: Forms that :func:`ranks` reads, for the help of options.
_RANKS = "4,6; 8-64 for each number from 8 to 64; 8..64 for 8, 16, 32 and 64"
#: MPI's names, which OSU's benchmarks have, where ours differ.
_MPI_NAMES = {"bcast": "broadcast"}


def positive(text: str) -> int:
    """A number from 1 on."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


def rank_count(text: str) -> int:
    """A number of ranks."""
    if (found := positive(text)) > MOST_RANKS:
        raise argparse.ArgumentTypeError(f"{text} is more than {MOST_RANKS} ranks")
    return found


def count(text: str) -> int:
    """A number from 0 on."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 0 on")
    return int(text)


def above_zero(text: str) -> float:
    """A finite number above 0."""
    if not (value := _finite(text)) > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return value


def not_negative(text: str) -> float:
    """A finite number from 0 on."""
    if not (value := _finite(text)) >= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no finite number from 0 on")
    return value


def _finite(text: str) -> float:
    """The number, or NaN for texts that are none."""
    try:
        value = float(text)
    except ValueError:
        return math.nan
    return value if math.isfinite(value) else math.nan


def size(text: str) -> int:
    """``"64M"`` -> 67108864."""
    match = re.fullmatch(r"(\d+)([KMG]?)i?B?", text.strip(), re.IGNORECASE)
    if not match:
        raise argparse.ArgumentTypeError(f"cannot read the size {text!r}; write 8, 4K, 1M or 2G")
    return int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2].upper()]


def rate(text: str) -> float:
    """GB/s: ``"25GB/s"`` -> 25.0, ``"200Gb/s"`` -> 25.0, ``"hdr"`` -> 25.0."""
    match = re.fullmatch(r"([\d.]+)([MG])([bB])/s", text)
    if text in NETWORKS:
        return NETWORKS[text]
    if match and (number := _finite(match[1])) > 0:
        return number / (8 if match[3] == "b" else 1) / (1e3 if match[2] == "M" else 1)
    raise argparse.ArgumentTypeError(
        f"{text!r} is no bandwidth; write 25GB/s, 200Gb/s, or one of {', '.join(NETWORKS)}"
    )


def topology(text: str) -> str:
    """The name of a network, or a file of the links between the ranks."""
    if text in TOPOLOGIES or text.endswith(".txt"):
        return text
    raise argparse.ArgumentTypeError(
        f"{text!r} is no network; there are {', '.join(TOPOLOGIES)}, or links.txt, a file"
    )


def split(text: str) -> list[str]:
    """At commas, but those between an algorithm's options: ``ring,parameter_server:servers=2``."""
    return [name for name in re.split(r",(?![\w]+=)", text) if name]


def ranks(text: str) -> list[int]:
    """``"1-4,8..64"`` -> ``[1, 2, 3, 4, 8, 16, 32, 64]``, as :data:`RANKS` says."""
    sizes: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:(-|\.\.)(\d+))?", part, re.ASCII)
        if not match or int(match[1]) < 1:
            raise argparse.ArgumentTypeError(f"cannot read {text!r}; write e.g. 1-33,64 or 8..64")
        first, last = int(match[1]), int(match[3] or match[1])
        if first > last:
            raise argparse.ArgumentTypeError(f"{part} is empty; write {last}{match[2]}{first}")
        if last > MOST_RANKS:
            raise argparse.ArgumentTypeError(f"{part} is more than {MOST_RANKS} ranks")
        if match[2] == "..":
            while first <= last:
                sizes.append(first)
                first *= 2
        else:
            sizes += range(first, last + 1)
    return sizes


def collective(text: str) -> str:
    """A collective, by its name or by MPI's."""
    if (name := _MPI_NAMES.get(text, text)) in CONTRACTS:
        return name
    if text.partition(":")[0] in {one.name for one in ALGORITHMS}:
        cure = f"write --algorithm {text}, or its collective before it"
        raise argparse.ArgumentTypeError(f"{text!r} is an algorithm; {cure}")
    raise argparse.ArgumentTypeError(f"{text!r} is no collective; there are {', '.join(CONTRACTS)}")


def collective_or_file(text: str) -> str:
    """A collective, or ``"mine.py:name"``."""
    return text if ".py" in text else collective(text)


def add_collective(
    parser: argparse.ArgumentParser, usual: str = "all", *, or_file: bool = False
) -> None:
    """Adds the collective, the first word of each command; without one it is ``usual``."""
    read, more = (collective_or_file, ", or mine.py:name") if or_file else (collective, "")
    text = f"{', '.join(CONTRACTS)}{more} ({usual})"
    default = None if usual == "all" else usual
    parser.add_argument("collective", nargs="?", type=read, default=default, help=text)


def add_drawn(parser: argparse.ArgumentParser, others: str = "") -> None:
    """Adds a collective and one of its algorithms, which :func:`drawn` reads."""
    add, text = parser.add_argument, f"name, NAME:key=value with options, or mine.py:name{others}"
    add("collective", nargs="?", help=f"{', '.join(CONTRACTS)} (allreduce)")
    add("algorithm", nargs="?", help=text)
    add("--algorithm", dest="named", metavar="NAME", help="the algorithm, as for other commands")
    add("-c", "--collective", dest="former", type=collective, help=argparse.SUPPRESS)


def drawn(options: argparse.Namespace) -> tuple[str, str]:
    """The collective and the algorithm of :func:`add_drawn`; UnknownAlgorithm: not one of each."""
    words = [word for word in (options.collective, options.algorithm, options.named) if word]
    if not 1 <= len(words) <= 2:
        raise UnknownAlgorithm("name one algorithm, as in allreduce ring")
    which = words[0] if len(words) == 2 else "allreduce"
    return options.former or _MPI_NAMES.get(which, which), words[-1]


def add_ranks(parser: argparse.ArgumentParser, usual: int | str | None = None) -> None:
    """Adds ``-n``: a number of ranks, numbers if ``usual`` is a text; ``None``: it is needed."""
    several = isinstance(usual, str)
    text = f"numbers of ranks: {_RANKS}" if several else "number of ranks"
    text += f" ({usual})" if usual else ""
    read = ranks if several else rank_count
    names = ("-n", "--ranks")
    parser.add_argument(*names, type=read, default=usual, required=not usual, help=text)


def add_bytes(parser: argparse.ArgumentParser, usual: str) -> None:
    """Adds ``-b``: the bytes of a buffer."""
    text = f"bytes of the buffer, as 8, 4K or 1M ({usual})"
    parser.add_argument("-b", "--bytes", type=size, default=usual, help=text)
    also(parser, "--size", "--bytes")


def add_sizes(add: Callable[..., object], most: str, factor: int) -> None:
    """Adds nccl-tests' sizes of buffers: ``-b``, ``-e`` and ``-f``."""
    add("-b", "--minbytes", type=size, default=8, help="smallest buffer, as 8, 4K, 1M (8)")
    add("-e", "--maxbytes", type=size, default=most, help=f"largest buffer ({most})")
    text = f"multiply each size by this to get the next ({factor})"
    add("-f", "--stepfactor", type=int, default=factor, help=text)


def also(parser: argparse.ArgumentParser, former: str, name: str) -> None:
    """Lets an option be spelt as in the release before, too; its help does not say so."""
    parser._option_string_actions[former] = parser._option_string_actions[name]


def add_network(parser: argparse.ArgumentParser) -> None:
    """Adds a modelled network: ``--topology``, ``--alpha`` and ``--bandwidth``."""
    add = parser.add_argument
    text = (
        f"network: {', '.join(TOPOLOGIES)}; or links.txt, a matrix of the links between the ranks "
        "in units of --bandwidth; flat: one switch (flat)"
    )
    add("--topology", type=topology, default="flat", metavar="NAME", help=text)
    add("--alpha", type=not_negative, default=1.5, help="latency of a message in us (1.5)")
    add("--bandwidth", type=above_zero, default=25.0, help="GB/s of a rank's port (25)")


def add_virtual(parser: argparse.ArgumentParser) -> None:
    """Adds the options of virtual ranks: their network, and how fast they compute."""
    add_network(parser)
    add = parser.add_argument
    slower = "factor on the time that virtual ranks take to compute (1)"
    add("--slower", type=above_zero, default=1.0, metavar="FACTOR", help=slower)
    moves = "messages also move while their ranks compute, not only within calls of MPI"
    add("--async-progress", action="store_true", help=moves)


def network(options: argparse.Namespace, size: int) -> "Topology":
    """The network of ``size`` ranks that :func:`add_network` describes."""
    port = extras.LinkCost(1e-6 * options.alpha, 1e-9 / options.bandwidth)
    return extras.build_topology(options.topology, size, port)


def in_words(options: argparse.Namespace) -> str:
    """The network that :func:`add_network` describes, for people."""
    return f"network {options.topology}, {options.alpha:g} us, {options.bandwidth:g} GB/s"


def known(text: str, every: Iterable[str] = ()) -> dict[str, str]:
    """``"ring,mine.py:biring"`` -> ``{"ring": "ring", "biring": "biring"}``: names as they are
    printed, and as they are registered; links of a file are printed as they were given.

    Algorithms of files and packages are proved and registered; ``all`` stands for ``every``.

    Raises:
        UnknownAlgorithm: a file has no such algorithm.
        ScheduleError: an algorithm is wrong.
    """
    given = (name for word in split(text) for name in (every if word == "all" else [word]))
    found = [(name, extras.resolve(name)) for name in given]
    return {name if ".txt" in name else registered: registered for name, registered in found}
