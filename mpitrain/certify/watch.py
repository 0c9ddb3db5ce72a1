"""Record of the steps that a script for ``torch.distributed`` takes on one rank."""

import re
from collections.abc import Iterator
from contextlib import suppress
from hashlib import blake2b
from inspect import signature
from itertools import chain
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from mpi4py import MPI
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from mpitrain.arrays import Array
from mpitrain.certify.record import Enough, Record, Recorded, Session
from mpitrain.data.generators import random_states

#: Words that wrappers put into the names of parameters.
_WRAPPERS = re.compile(r"\b(module|_orig_mod|_checkpoint_wrapped_module)\.")


class TorchWatch:
    """Records what this rank computes."""

    def __init__(self, session: Session) -> None:
        """Nothing is known yet."""
        self._session, self._record, self._comm = session, session.record, MPI.COMM_WORLD
        self._known, self._first = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
        self._buffers = dict[str, tuple[torch.nn.Module, str]]()
        self._optimizers, self._trains = list[Any](), WeakSet[torch.nn.Module]()
        self._depth = self._stepping = 0
        self._is_backward = False
        self._states = list[object]()
        self._reset()

    def _reset(self) -> None:
        self._samples, self._loss, self._gradients = list[bytes](), 0.0, dict[str, Array]()
        self._made = set[StorageWeakRef]()

    def call(self, theirs: Any, module: torch.nn.Module, *args: Any, **named: Any) -> Any:
        """A call in training; the outermost module with parameters gets the samples.

        A module that is never in training mode trains as well, as one of transformers may.
        """
        is_part = self._depth or next(module.parameters(), None) is not None
        is_test = not (torch.is_grad_enabled() and (module.training or module not in self._trains))
        if self._is_backward or not is_part or is_test:
            return self._noted(theirs(module, *args, **named), (args, named), bool(is_part))
        if not self._depth:
            self._note_draws("the code around modules", self._states)
            if module.training and module not in self._trains:
                self._trains.update(module.modules())
            self._learn(module)
            self._take_samples((args, named))
        before, self._depth = random_states(), self._depth + 1
        try:
            found = theirs(module, *args, **named)
        finally:
            self._depth -= 1
            self._note_draws(type(module).__name__, before)
            self._states = random_states()
        return self._noted(found, (args, named), not self._depth)

    def _noted(self, found: Any, given: Any, has_made: bool) -> Any:
        """Result of a module; note its types, and its memory, which holds no samples then.

        The graph of the loss lacks what a frozen module computes.
        """
        if not self._record.steps:
            for one in filter(torch.is_tensor, tree_leaves(found)):
                note_type(self._record, one.dtype)
        if has_made:
            self._made |= {*_storages(found)}.difference(_storages(given))
        return found

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

    def load(self, theirs: Any, loader: Any, *args: Any, **named: Any) -> None:
        """A loader, in the reference with the batches of all ranks."""
        given = signature(theirs).bind(loader, *args, **named)
        size = given.arguments.get("batch_size", 1)
        if size is not None and given.arguments.get("batch_sampler") is None:
            given.arguments["batch_size"] = size * self._session.batches
        theirs(*given.args, **given.kwargs)

    def add_group(self, theirs: Any, optimizer: Any, *args: Any, **named: Any) -> None:
        """An optimiser that gets parameters."""
        self._optimizers += [optimizer] * all(one is not optimizer for one in self._optimizers)
        theirs(optimizer, *args, **named)

    def clip(self, theirs: Any, *args: Any, **named: Any) -> Any:
        """A change of the gradients, which are noted before."""
        self._take_gradients()
        return theirs(*args, **named)

    def begins(self, theirs: Any, optimizer: Any, args: Any, named: Any) -> None:
        """The beginning of an optimiser's step, perhaps within another one's."""
        self._stepping += 1
        self._take_gradients()

    def ends(self, theirs: Any, optimizer: Any, args: Any, named: Any) -> None:
        """The end of an optimiser's step; raises Enough after the last one."""
        self._stepping -= 1
        if self._stepping:
            return
        own = {id(one) for group in optimizer.param_groups for one in group["params"]}
        known = {name: one for name, one in self._known.items() if id(one) in own}
        gradients = {name: one for name, one in self._gradients.items() if name in known}
        samples = sorted(chain.from_iterable(self._comm.allgather(self._samples)))
        loss = self._comm.allreduce(self._loss) / self._comm.size
        buffers = {name: getattr(part, key) for name, (part, key) in self._buffers.items()}
        parameters = {name: _whole(one) for name, one in {**known, **buffers}.items()}
        self._record.steps.append(Recorded(samples, loss, gradients, parameters))
        self._reset()
        with torch.no_grad():
            for name, one in known.items() if self._session.mutation == "stale" else ():
                _local(one).copy_(self._first[name])
        if len(self._record.steps) == self._session.last:
            raise Enough

    def _learn(self, module: torch.nn.Module) -> None:
        """Note the parameters and running values of a module that are not known yet."""
        known = {id(one) for one in self._known.values()}
        for name, one in module.named_parameters():
            if id(one) not in known:
                self._learn_one(name, one)
        places = {(id(part), key) for part, key in self._buffers.values()}
        for prefix, part in module.named_modules():
            if not isinstance(part, torch.nn.modules.batchnorm._NormBase):
                continue  # another buffer may be a rank's own, as a count of its samples
            for key, value in part.named_buffers(recurse=False):
                if value.is_floating_point() and (id(part), key) not in places:
                    name = self._free(f"{prefix}.{key}")
                    self._buffers[name], self._record.initial[name] = (part, key), _whole(value)

    def _free(self, name: str) -> str:
        """A name that nothing has yet."""
        name = _WRAPPERS.sub("", name).lstrip(".")
        while name in self._record.initial:
            name += "'"
        return name

    def _learn_one(self, name: str, one: torch.Tensor) -> None:
        """Note a parameter, and move it."""
        if not (one.is_floating_point() or one.is_complex()):
            return
        name, local = self._free(name), _local(one)
        self._known[name], self._first[name] = one, local.clone()
        self._record.eps = max(self._record.eps, torch.finfo(one.dtype).eps)
        flat = local.reshape(-1).clone()
        self._session.move(flat)
        local.data.copy_(flat.view(local.shape))  # a backward pass may have to come yet
        self._record.initial[name] = _whole(one)

    def _take_samples(self, given: Any) -> None:
        """Note the rows of tensors that no module has made."""
        tensors = [
            _dense(one.detach())
            for one in tree_leaves(given)
            if torch.is_tensor(one) and one.dim() and one.numel() and one.grad_fn is None
            if self._made.isdisjoint(_storages(one))
        ]
        count = len(tensors[0]) if tensors else 0
        tensors = [one for one in tensors if len(one) == count]
        if self._session.mutation == "repeat" and self._comm.rank == 0:
            for one in tensors:
                one[-1] = one[0]
        rows = [one.cpu().contiguous().reshape(count, -1).view(torch.uint8) for one in tensors]
        for number in range(count):
            values = b"".join(one[number].numpy().tobytes() for one in rows)
            self._samples.append(blake2b(values, digest_size=16).digest())

    def _take_gradients(self) -> None:
        """Note the gradients, once a step; also of parameters that no module has shown."""
        if self._gradients:
            return
        known = {id(one) for one in self._known.values()}
        groups = chain.from_iterable(own.param_groups for own in self._optimizers)
        for group, own in enumerate(groups):
            for number, one in enumerate(own["params"]):
                if one.grad is not None and id(one) not in known:
                    self._learn_one(f"parameter {number} of group {group}", one)
        found = {name: one.grad for name, one in self._known.items() if one.grad is not None}
        mistakes = {"scale": self._comm.size + 1.0, "drop": 0.0}
        factor = mistakes.get(self._session.mutation, 1.0)
        for one in list(found.values())[:: 1 + (factor == 0)]:
            one.mul_(factor)
        self._gradients = {name: _whole(one) for name, one in found.items()}


def note_type(record: Record, kind: torch.dtype) -> None:
    """Note a type of numbers in a pass, if it is the narrowest one."""
    if kind.is_floating_point:
        told = torch.finfo(kind).eps, str(kind).removeprefix("torch.")
        record.narrow = max(record.narrow, told)


def _storages(values: Any) -> Iterator[StorageWeakRef]:
    """The memory of tensors; its name stays free as long as somebody has it."""
    for one in tree_leaves(values):
        if torch.is_tensor(one):
            with suppress(NotImplementedError, RuntimeError):  # as a sparse one has none
                yield StorageWeakRef(one.untyped_storage())


def _local(tensor: Any) -> torch.Tensor:
    """This rank's part of a tensor, in its memory."""
    own: torch.Tensor = tensor.detach()
    return own.to_local() if hasattr(own, "to_local") else own


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


def _whole(tensor: Any) -> Array:
    """A copy of a whole tensor; collective where it is in shards."""
    own = tensor.detach()
    own = _dense(own.full_tensor() if hasattr(own, "full_tensor") else own)
    is_half = own.dtype in (torch.bfloat16, torch.float16)
    return np.array((own.float() if is_half else own).cpu().numpy())
