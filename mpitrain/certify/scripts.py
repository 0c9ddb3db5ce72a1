"""A script for ``torch.distributed`` that says what its steps compute."""

import functools
import gc
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from hashlib import blake2b
from itertools import chain
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from torch.nn.utils import clip_grad
from torch.optim import optimizer as optimizers
from torch.utils._pytree import tree_leaves

from collectives.torch import name_ranks, take_over
from mpitrain.arrays import Array
from mpitrain.certify.record import Enough, Recorded, Session
from mpitrain.data.generators import random_states

#: Words that wrappers put into the names of parameters.
_WRAPPERS = re.compile(r"\b(module|_orig_mod|_checkpoint_wrapped_module)\.")


@contextmanager
def watched(session: Session) -> Iterator[None]:
    """Record the steps of torch's optimisers on this rank, unless the trainer records its own."""
    take_over(("gloo",))  # whose ranks would wait for one that fails
    name_ranks()
    watch, usual = _TorchWatch(session), torch.get_default_dtype()
    replaced: list[tuple[Any, str, Callable[..., Any]]] = [
        (torch.nn.Module, "__call__", watch.call),
        (torch.autograd, "backward", watch.backward),
        (torch.utils.data.DataLoader, "__init__", watch.load),
    ]
    for owner in (torch.nn.utils, clip_grad):
        replaced += [(owner, f"clip_grad_{by}_", watch.clip) for by in ("norm", "value")]
    with ExitStack() as stack:
        stack.callback(_forget_ranks)
        stack.callback(torch.set_default_dtype, usual)
        torch.set_default_dtype(torch.float64 if session.is_double else usual)
        stack.callback(optimizers.register_optimizer_step_pre_hook(watch.begins).remove)
        stack.callback(optimizers.register_optimizer_step_post_hook(watch.ends).remove)
        for owner, name, act in replaced:
            stack.callback(setattr, owner, name, theirs := getattr(owner, name))
            setattr(owner, name, _in_place_of(theirs, act))
        yield


def _in_place_of(theirs: Callable[..., Any], act: Callable[..., Any]) -> Callable[..., Any]:
    return functools.wraps(theirs)(lambda *given, **named: act(theirs, *given, **named))


def _forget_ranks() -> None:
    """End the groups of a run, and what accelerate remembers of its ranks."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    if state := sys.modules.get("accelerate.state"):
        state.AcceleratorState._reset_state(True)
        state.GradientState._reset_state()
    gc.collect()


class _TorchWatch:
    """Records what this rank computes."""

    def __init__(self, session: Session) -> None:
        self._session, self._record, self._comm = session, session.record, MPI.COMM_WORLD
        self._known, self._first = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
        self._depth = self._stepping = 0
        self._is_backward = False
        self._states = list[object]()
        self._reset()

    def _reset(self) -> None:
        self._samples, self._loss, self._gradients = list[bytes](), 0.0, dict[str, Array]()

    def call(self, theirs: Any, module: torch.nn.Module, *args: Any, **named: Any) -> Any:
        """A call in training; the outermost module with parameters gets the samples."""
        record, is_part = self._record, self._depth or next(module.parameters(), None) is not None
        is_off = record.is_ours or self._is_backward or not torch.is_grad_enabled()
        if is_off or not (module.training and is_part):
            return theirs(module, *args, **named)
        if not self._depth:
            self._note_draws("the code around modules", self._states)
            self._learn(module)
            self._take_samples((args, named))
        before, self._depth = random_states(), self._depth + 1
        try:
            return theirs(module, *args, **named)
        finally:
            self._depth -= 1
            self._note_draws(type(module).__name__, before)
            self._states = random_states()

    def _note_draws(self, who: str, before: list[object]) -> None:
        """Note who has drawn random numbers since the states of ``before``; empty: unknown."""
        if before and not self._record.draws and before != random_states():
            self._record.draws = who

    def backward(self, theirs: Any, tensors: Any, *args: Any, **named: Any) -> None:
        """A backward pass, which begins with the loss unless it is within another one."""
        if self._is_backward:
            return theirs(tensors, *args, **named)
        self._note_draws("the loss", self._states)
        self._states = []
        self._loss += sum(one.item() for one in tree_leaves(tensors) if one.numel() == 1)
        self._is_backward = True
        try:
            theirs(tensors, *args, **named)
        finally:
            self._is_backward = False

    def load(
        self, theirs: Any, loader: Any, data: Any, size: Any = 1, *args: Any, **named: Any
    ) -> None:
        """A loader, in the reference with the batches of all ranks."""
        given = () if "batch_sampler" in named else (named.pop("batch_size", size),)
        theirs(
            loader, data, *(one and one * self._session.batches for one in given), *args, **named
        )

    def clip(self, theirs: Any, *args: Any, **named: Any) -> Any:
        """A change of the gradients, which are noted before."""
        self._take_gradients()
        return theirs(*args, **named)

    def begins(self, optimizer: Any, args: Any, named: Any) -> None:
        """The beginning of an optimiser's step, perhaps within another one's."""
        self._stepping += 1
        self._take_gradients()

    def ends(self, optimizer: Any, args: Any, named: Any) -> None:
        """The end of an optimiser's step; raises Enough after the last one."""
        self._stepping -= 1
        if self._stepping or self._record.is_ours:
            return
        own = {id(one) for group in optimizer.param_groups for one in group["params"]}
        known = {name: one for name, one in self._known.items() if id(one) in own}
        gradients = {name: one for name, one in self._gradients.items() if name in known}
        samples = sorted(chain.from_iterable(self._comm.allgather(self._samples)))
        loss = self._comm.allreduce(self._loss) / self._comm.size
        parameters = {name: _whole(one) for name, one in known.items()}
        self._record.steps.append(Recorded(samples, loss, gradients, parameters))
        self._reset()
        with torch.no_grad():
            for name, one in known.items() if self._session.mutation == "stale" else ():
                _local(one).copy_(self._first[name])
        if len(self._record.steps) == self._session.last:
            raise Enough

    def _learn(self, module: torch.nn.Module) -> None:
        """Note the parameters of a module that are not known yet, and move them."""
        known = {id(one) for one in self._known.values()}
        for name, one in module.named_parameters():
            if id(one) not in known:
                name = _WRAPPERS.sub("", name)
                name += "'" * (name in self._known)
                self._known[name], self._record.initial[name] = one, _whole(one)
                self._first[name] = _local(one).clone()
                self._record.eps = max(self._record.eps, torch.finfo(one.dtype).eps)
                with torch.no_grad():
                    self._session.move(_local(one).view(-1))

    def _take_samples(self, given: Any) -> None:
        """Note the rows of tensors."""
        tensors = [one for one in tree_leaves(given) if torch.is_tensor(one) and one.numel()]
        count = len(tensors[0]) if tensors and tensors[0].dim() else 0
        tensors = [one.detach() for one in tensors if one.dim() and len(one) == count]
        if self._session.mutation == "repeat" and self._comm.rank == 0:
            for one in tensors:
                one[-1] = one[0]
        rows = [one.cpu().contiguous().reshape(count, -1).view(torch.uint8) for one in tensors]
        for number in range(count):
            values = b"".join(one[number].numpy().tobytes() for one in rows)
            self._samples.append(blake2b(values, digest_size=16).digest())

    def _take_gradients(self) -> None:
        """Note the gradients, once a step."""
        if self._gradients or self._record.is_ours:
            return
        found = {name: one.grad for name, one in self._known.items() if one.grad is not None}
        factor = {"scale": float(self._comm.size), "drop": 0.0}.get(self._session.mutation, 1.0)
        for one in list(found.values())[:: 1 + (factor == 0)]:
            one.mul_(factor)
        self._gradients = {name: _whole(one) for name, one in found.items()}


def _local(tensor: Any) -> torch.Tensor:
    """This rank's part of a tensor, in its memory."""
    own: torch.Tensor = tensor.detach()
    return own.to_local() if hasattr(own, "to_local") else own


def _whole(tensor: Any) -> Array:
    """A copy of a whole tensor; collective where it is in shards."""
    own = tensor.detach()
    own = own.full_tensor() if hasattr(own, "full_tensor") else own
    is_half = own.dtype in (torch.bfloat16, torch.float16)
    return np.array((own.float() if is_half else own).cpu().numpy())
