"""Functions of torch that tell the session of their thread what a script for it computes."""

import functools
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.nn.utils import clip_grad
from torch.optim import optimizer as optimizers
from torch.utils._pytree import tree_leaves

from collectives.torch import name_ranks, take_over
from mpitrain.certify.record import HERE, Record, Session
from mpitrain.certify.watch import TorchWatch, note_type


@functools.cache
def install() -> None:
    """Let torch ask the session of its thread, for good: modules keep the functions they import."""
    every: list[tuple[Any, str, str]] = [
        (torch.nn.Module, "__call__", "call"),
        (torch.autograd, "backward", "backward"),
        (torch.utils.data.DataLoader, "__init__", "load"),
        (torch.optim.Optimizer, "add_param_group", "add_group"),
    ]
    for owner in (torch.nn.utils, clip_grad):
        every += [(owner, f"clip_grad_{by}_", "clip") for by in ("norm", "value")]
    for owner, name, act in every:
        setattr(owner, name, _asking(getattr(owner, name), act))
    for name in ("backward", "grad"):
        setattr(torch.autograd, name, _telling_types(getattr(torch.autograd, name)))
    none = lambda *given: None  # noqa: E731
    optimizers.register_optimizer_step_pre_hook(_asking(none, "begins"))
    optimizers.register_optimizer_step_post_hook(_asking(none, "ends"))


def _asking(theirs: Callable[..., Any], act: str) -> Callable[..., Any]:
    """A function that gives calls to the watch, unless there is none or the trainer records."""

    @functools.wraps(theirs)
    def asking(*given: Any, **named: Any) -> Any:
        session = HERE.session
        if session is None or session.watch is None or session.record.is_ours:
            return theirs(*given, **named)
        return getattr(session.watch, act)(theirs, *given, **named)

    return asking


def _telling_types(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """A function of autograd that notes the types of its graph before the first step."""

    @functools.wraps(theirs)
    def telling(*given: Any, **named: Any) -> Any:
        if HERE.session and not HERE.session.record.steps:
            _note_types(HERE.session.record, (given[:1], named))
        return theirs(*given, **named)

    return telling


def _note_types(record: Record, tensors: Any) -> None:
    """Note the narrowest type of the numbers in the graphs of tensors."""
    todo = [getattr(one, "grad_fn", None) for one in tree_leaves(tensors)]
    seen = set[Any]()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        todo += [following for following, _ in node.next_functions]
        for one in getattr(node, "_input_metadata", ()):
            note_type(record, one.dtype)


@contextmanager
def watched(session: Session) -> Iterator[None]:
    """Record the steps of torch's optimisers on this rank, unless the trainer records its own."""
    take_over(("gloo",))  # whose ranks would wait for one that fails
    name_ranks()
    install()
    usual = torch.get_default_dtype()
    with ExitStack() as stack:
        stack.callback(_forget_ranks)
        stack.callback(torch.set_default_dtype, usual)
        torch.set_default_dtype(torch.float64 if session.is_double else usual)
        session.watch = TorchWatch(session)
        stack.callback(setattr, session, "watch", None)  # a cycle would keep the model
        yield


def _forget_ranks() -> None:
    """End the groups of a run, and what accelerate remembers of its ranks."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    if state := sys.modules.get("accelerate.state"):
        state.AcceleratorState._reset_state(True)
        state.GradientState._reset_state()
    gc.collect()
