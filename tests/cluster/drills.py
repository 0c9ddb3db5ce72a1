"""Faults that need several hosts: links that are cut or slow, and the daemon of another host.

As root:

    python -m tests.cluster.drills tests/drills/drill.toml --seeds 20

Two hosts in network namespaces, two ranks each, a link of 1 Gb/s; otherwise as ``tests.drills``.
"""

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.cluster.hosts import Hosts, environment, hosts
from tests.drills.__main__ import add_options, run
from tests.drills.drill import Drills
from tests.drills.outside import Outside, call

KINDS = "kill,daemon,freeze,cut,slow"
#: The last host's link; mpirun runs on the first.
HOST = 1


class Link:
    """The link of one host, cut or slowed down to a hundredth."""

    def __init__(self, up: Hosts, kind: str) -> None:
        self.namespace = f"{up.prefix}{HOST}"
        self.cuts = kind == "cut"

    def missing(self) -> str:
        return ""

    @contextmanager
    def around(self, run: Path) -> Iterator[None]:
        yield

    def strike(self, run: Path) -> None:
        self._set("down", "10mbit")

    def mend(self, run: Path) -> None:
        self._set("up", "1000mbit")

    def _set(self, state: str, rate: str) -> None:
        if self.cuts:
            call("ip", "-n", self.namespace, "link", "set", "eth0", state)
        else:
            shape = ("tbf", "rate", rate, "burst", "1mb", "latency", "100ms")
            call("tc", "-n", self.namespace, "qdisc", "change", "dev", "eth0", "root", *shape)


def drills(up: Hosts, job: Path, folder: Path, settings: list[str]) -> Drills:
    """Drills of a job on the hosts."""
    outside: dict[str, Outside] = {kind: Link(up, kind) for kind in ("cut", "slow")}
    launcher = [*up.inside(0), *up.mpirun(2, [])]
    return Drills(launcher, job, folder.absolute(), settings, outside, environment())


def main() -> int:
    """Run them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_options(parser)
    parser.set_defaults(faults=KINDS)
    options = parser.parse_args()
    options.ranks = 4
    with hosts(2, rate_mbit=1000) as up:
        return run(options, drills(up, options.config, options.output, options.set))


if __name__ == "__main__":
    sys.exit(main())
