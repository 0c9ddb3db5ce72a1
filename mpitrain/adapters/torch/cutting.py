"""A module cut into parts that follow one another, for the stages of a pipeline."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx


def cut(module: torch.nn.Module, after: Sequence[str]) -> list[torch.nn.Module]:
    """The parts of a module that end where the modules of these names have given their results.

    Parameters and buffers keep their names, and are the module's own.  A part takes what the part
    before it gives: a tensor, or as many arguments as the tuple has that it gives.

    Args:
        module: can be traced by ``torch.fx``: which way it goes does not depend on values.
        after: names of modules in it, in the order in which they are called.

    Raises:
        ValueError: it cannot be traced, or has no such module.
    """
    try:
        graph = fx.Tracer().trace(module)
    except Exception as error:  # whatever the module's own code makes of stand-ins for tensors
        raise ValueError(
            f"a {type(module).__name__} cannot be cut, as torch.fx cannot trace it "
            f"({type(error).__name__}: {' '.join(str(error).split())}); give a torch.nn.Sequential "
            "of its parts"
        ) from error
    nodes = [node for node in graph.nodes if node.op != "output"]
    ends = [_last(nodes, name) for name in after]
    if ends != sorted(set(ends)):
        raise ValueError(f"cuts = {list(after)} are not in the order in which they are called")
    whose = {node: sum(index > end for end in ends) for index, node in enumerate(nodes)}
    (output,) = (node for node in graph.nodes if node.op == "output")
    whose[output] = len(after)
    for number, name in enumerate(after, 1):
        if not _crossing(whose, number):
            raise ValueError(f"cuts: nothing that is computed before {name!r} is used behind it")
    return [_part(module, graph, whose, number, after) for number in range(len(after) + 1)]


def _last(nodes: Sequence[fx.Node], name: str) -> int:
    """Index of the last node of the module of this name."""
    found = [index for index, node in enumerate(nodes) if name in _inside(node)]
    if not found:
        known = ", ".join(sorted({name for node in nodes for name in _inside(node)}))
        raise ValueError(f"cuts: no module {name!r} is called; there are {known}")
    return found[-1]


def _inside(node: fx.Node) -> set[str]:
    """The modules that a node is a part of; of the second call of one, fx says ``name@1``."""
    return {key.partition("@")[0] for key in node.meta.get("nn_module_stack", {})}


def _part(
    module: torch.nn.Module,
    graph: fx.Graph,
    whose: dict[fx.Node, int],
    number: int,
    after: Sequence[str],
) -> torch.nn.Module:
    """The nodes of one part as a module."""
    own = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    if number:
        for entering in _crossing(whose, number):
            copies[entering] = own.placeholder(entering.name)

    def copied(node: fx.Node) -> fx.Node:
        if node not in copies and node.op == "get_attr":  # every part takes what it needs of them
            copies[node] = own.node_copy(node)
        return copies[node]

    result: Any = None
    for node in graph.nodes:
        if whose[node] != number or node.op == "get_attr":
            continue
        if node.op == "output":
            result = fx.map_arg(node.args[0], copied)
        else:
            copies[node] = own.node_copy(node, copied)
    if number < len(after):
        leaving = tuple(map(copied, _crossing(whose, number + 1)))
        result = leaving[0] if len(leaving) == 1 else leaving
    own.output(result)
    return fx.GraphModule(module, own, type(module).__name__)


def _crossing(whose: dict[fx.Node, int], number: int) -> list[fx.Node]:
    """What goes from the parts before into the part of this number or later ones."""
    return [
        node
        for node, part in whose.items()
        if part < number
        and node.op != "get_attr"
        and any(whose[user] >= number for user in node.users)
    ]
