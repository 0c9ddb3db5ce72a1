"""Cut a module into parts that follow one another, for the stages of a pipeline."""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import fx

from mpitrain.adapters.torch.arrays import as_tensor
from mpitrain.adapters.torch.checks.module import modes_kept
from mpitrain.adapters.torch.checks.probe import one_line
from mpitrain.arrays import Array
from mpitrain.fields import fields, named


def cut(module: torch.nn.Module, after: Sequence[str]) -> list[torch.nn.Module]:
    """Parts of a module, each of which ends behind a module of these names.

    Parameters and buffers keep their names, and are the module's own.  A part takes the results of
    the part before it: a tensor, or the elements of a tuple as arguments.

    Args:
        module: a module that ``torch.fx`` can trace: its branches do not depend on values.
        after: names of modules within it, in the order in which they are called.

    Raises:
        ValueError: it cannot be traced, or has no such module.
    """
    if has_hooks(module):
        raise ValueError(
            f"a {type(module).__name__} cannot be cut, as its own hooks belong to no part of it"
        )
    try:
        with modes_kept(module):
            graph = fx.Tracer().trace(module.train())
    except Exception as error:  # user code may fail in any way with torch.fx's proxies
        raise ValueError(
            f"a {type(module).__name__} cannot be cut, as torch.fx cannot trace it "
            f"({type(error).__name__}: {one_line(error)}); give a torch.nn.Sequential of its parts"
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


def has_hooks(module: torch.nn.Module) -> bool:
    """Whether the module as a whole has hooks for its forward or backward pass."""
    kinds = "forward_pre", "forward", "backward_pre", "backward"
    return any(getattr(module, f"_{kind}_hooks") for kind in kinds)


def expect_the_same(module: torch.nn.Module, after: Sequence[str], inputs: Array) -> None:
    """Check that the parts in a row have the results and gradients of the module.

    Things that torch.fx cannot see become constants of the parts: a mode of evaluation, a branch, a
    ``torch.no_grad()``.

    Args:
        module: the module; it is tried in evaluation mode, in which nothing is random.
        after: names of modules behind which it is cut.
        inputs: inputs for some samples.

    Raises:
        ValueError: results or gradients differ.
    """

    kind = next((p.dtype for p in module.parameters()), torch.get_default_dtype())
    given = {
        name: part.to(kind) if part.is_floating_point() else part
        for name, part in ((n, as_tensor(a)) for n, a in fields(inputs).items())
    }
    by_name = not {"", "0"} & given.keys()
    args, kwargs = ((), given) if by_name else (tuple(given.values()), {})
    module = deepcopy(module)
    parts = [part.eval() for part in cut(module, after)]
    module.eval()

    def results(outputs: Any) -> list[torch.Tensor]:
        values = [part for part in named(outputs).values() if part.requires_grad]
        trained = [p for p in module.parameters() if p.requires_grad]
        total = torch.stack([part.double().sum() for part in values]).sum() if values else None
        found = (
            torch.autograd.grad(total, trained, allow_unused=True, materialize_grads=True)
            if total is not None
            else ()
        )
        return [*(part.detach() for part in named(outputs).values()), *found]

    whole = results(module(*args, **kwargs))
    found = parts[0](*args, **kwargs)
    for part in parts[1:]:
        found = part(*found) if isinstance(found, tuple) else part(found)
    cut_up = results(found)
    if len(whole) != len(cut_up) or not all(
        torch.allclose(a, b, rtol=1e-3, atol=1e-5, equal_nan=True)
        for a, b in zip(whole, cut_up, strict=False)
    ):
        raise ValueError(
            f"the parts of a {type(module).__name__} give other results than all of it: torch.fx "
            "has made a constant of a mode, a branch or torch.no_grad(); cut elsewhere, or give a "
            "torch.nn.Sequential of its parts"
        )


def _last(nodes: Sequence[fx.Node], name: str) -> int:
    """Index of the last node of the module of this name."""
    found = [index for index, node in enumerate(nodes) if name in _inside(node)]
    if not found:
        known = ", ".join(sorted({name for node in nodes for name in _inside(node)}))
        raise ValueError(f"cuts: no module {name!r} is called; there are {known}")
    return found[-1]


def _inside(node: fx.Node) -> set[str]:
    """The modules that a node is a part of; fx calls the second call of one ``name@1``."""
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
        if node not in copies and node.op == "get_attr":  # every part has the attributes it needs
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
    """Nodes of earlier parts that the part of this number or later ones use."""
    return [
        node
        for node, part in whose.items()
        if part < number
        and node.op != "get_attr"
        and any(whose[user] >= number for user in node.users)
    ]
