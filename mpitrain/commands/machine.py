"""Flags that describe a cluster, for commands that predict steps on it."""

import argparse

import numpy as np

from collectives.analysis import NETWORK, NODE, LinkCost
from collectives.commands import above_zero, add_ranks, not_negative, positive
from mpitrain.config import ConfigError
from mpitrain.search.links import measured
from mpitrain.search.machine import Machine

#: Ranks whose steps are proved in half a minute.
MOST_RANKS = 1 << 16
#: Seconds of a small layer's pass on a GPU: some tens of kernels.
_LAUNCH_S = 5e-4
#: More than this, an operation, a byte or a message takes on no machine.
_SLOWEST_S = 1e9


def add_machine(parser: argparse.ArgumentParser) -> None:
    """Adds the ranks, what each computes and holds, and the links between them."""
    add_ranks(parser)
    add = parser.add_argument
    add("--nodes", type=positive, default=1, help="nodes, each with equally many ranks (1)")
    rate = (
        "floating-point operations per second of a rank in matrix products, as 1e14: layers are "
        f"priced by their shapes, with {1e3 * _LAUNCH_S:g} ms of overhead forward and twice that "
        "backward. Without it, each layer is timed on this machine"
    )
    add("--flops", type=above_zero, help=rate)
    stream = "bandwidth of a rank's memory, for --flops (infinite)"
    add("--stream", type=above_zero, metavar="GB/S", help=stream)
    add("--memory", type=above_zero, metavar="GIB", help="GiB that a rank may use (no limit)")
    link = "latency in microseconds and GB/s between"
    here = "0.5,150; without --flops, as measured here"
    unit = "US,GB/S"
    add("--inside", type=_link, metavar=unit, help=f"{link} ranks of a node ({here})")
    add("--network", type=_link, metavar=unit, default=NETWORK, help=f"{link} nodes (1.5,25)")
    add("--adapters", type=positive, default=1, help="network ports of a node (1)")
    call = (
        "microseconds that software takes for a pass of a stage, a message or a collective, "
        "whatever its size (0; without --flops, as measured here)"
    )
    add("--call", type=not_negative, metavar="US", help=call)


def machine(options: argparse.Namespace) -> Machine:
    """The cluster that the flags describe; without ``--flops``, costs of layers are seconds, and
    the ranks of a node talk as those of this machine do, which is printed.

    Raises:
        ConfigError: the nodes do not divide the ranks, or ranks cannot be started here.
    """
    if options.ranks % options.nodes:
        raise ConfigError(
            f"--nodes {options.nodes} do not divide the {options.ranks} ranks; give another number"
        )
    per_node, counted = options.ranks // options.nodes, bool(options.flops)
    inside, call = options.inside or NODE, 1e-6 * (options.call or 0.0)
    missing = [key for key in ("inside", "call") if getattr(options, key) is None]
    if not counted and per_node > 1 and missing:
        found = measured(per_node)
        inside = options.inside or LinkCost(0.0, found.beta)
        call = found.call if "call" in missing else call
        told = {"inside": f"0,{1e-9 / found.beta:.3g}", "call": f"{1e6 * call:.3g}"}
        print("measured here:", *(f"--{key} {told[key]}" for key in missing))
    units = [1 / (options.flops or 1), 1 / (options.stream or 1), call]
    units += [n for own in (inside, options.network) for n in (own.alpha, own.beta)]
    if max(units) > _SLOWEST_S:
        raise ConfigError(
            "--flops, --stream, --call, --inside or --network: so slow a machine never ends a "
            f"step; one operation, byte or message takes at most {_SLOWEST_S:g} s"
        )
    return Machine(
        options.ranks,
        per_node,
        options.flops or 1.0,
        options.stream * 1e9 if options.stream and counted else np.inf,
        _LAUNCH_S if counted else 0.0,
        options.memory * 2**30 if options.memory else np.inf,
        inside,
        options.network,
        options.adapters,
        call,
        copying=not counted,
    )


def _link(text: str) -> LinkCost:
    """A link from ``microseconds,GB/s``."""
    try:
        alpha, rate = (float(part) for part in text.split(","))
        if not (0 <= alpha < np.inf and 0 < rate < np.inf):
            raise ValueError
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected microseconds and GB/s, as 1.5,25, got {text!r}"
        ) from None
    return LinkCost(alpha * 1e-6, 1e-9 / rate)
