"""A program's module beside its training, which goes on with values of its own."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from mpitrain.adapters.torch.checks.module_class import hooked
from mpitrain.adapters.torch.modules.whole import load_into, torch_layers
from mpitrain.config import ConfigError
from mpitrain.metrics.records import Back, Epoch, Record, Round, Skipped, Step, Write
from mpitrain.training.parts import Parts

if TYPE_CHECKING:
    from mpitrain.adapters.torch.shadow.shadow import Shadow

_STALE = (
    "the trainer's module has not the values that training has now; call trainer.gather() on all "
    "ranks, which gives it them"
)
_LOST = (
    ", which the trainer has taken over and would not see; call end(reason), change it after "
    "fit(), and begin another trainer; for other rates, set trainer.rate_factor"
)
#: Attributes that each module has; the trainer sets modes itself.
_TORCHS = vars(torch.nn.Module()).keys()
_T = torch.Tensor
#: Questions about a tensor that do not ask for its values.
_ABOUT: frozenset[Any] = frozenset({
    _T.dim, _T.element_size, _T.is_complex, _T.is_contiguous, _T.is_floating_point, _T.nelement,
    _T.numel, _T.requires_grad_, _T.size, _T.stride,
    *(getattr(_T, name).__get__ for name in (
        "device", "dtype", "grad_fn", "is_cuda", "is_leaf", "itemsize", "layout", "nbytes", "ndim",
        "requires_grad", "shape",
    )),
})  # fmt: skip


class OwnModule:
    """A program's module, which follows its training when asked.

    Attributes:
        module: the module, whatever values it has.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        #: The parameters as the loop copied them; ``None`` once it trains.
        self._copied: list[tuple[int, int]] | None = self._versions()
        #: Steps after which the module got its values.
        self._steps = 0
        self._looks = _Looks(module)

    def current(self, parts: Parts) -> torch.nn.Module:
        """The module; RuntimeError: it has values of the past, and nobody watches who looks."""
        if not (self._looks.watches or self._is_current(parts)):
            raise RuntimeError(_STALE)
        return self.module

    def load(self, parts: Parts) -> None:
        """Give the module the values of training; collective."""
        load_into(self.module, parts)
        self._steps = parts.steps_done

    def gather(self, parts: Parts) -> torch.nn.Module:
        """The module with the values of training, as :meth:`mpitrain.Trainer.gather`."""
        if parts.asked.seen is not None:
            if not isinstance(parts.asked.seen, Step | Skipped | Epoch | Round):
                raise RuntimeError("gather() in on_record: call it for a Step or an Epoch")
            parts.asked.agree(parts.comm, gathers=True)
            self._looks.rests = True
        self.load(parts)
        self._looks.rests = self._looks.is_late = False
        return self.module

    def begin(self) -> None:
        """Training begins.

        Raises:
            ConfigError: parameters were changed since the loop copied them, or have hooks.
        """
        if self._copied is None:
            return
        if self._copied != self._versions():
            raise ConfigError(
                "model: its parameters were changed after the trainer was made, which has copied "
                "them; load them before, for example in the function that makes the model"
            )
        if name := hooked(self.module):
            raise ConfigError(
                f"model: {name} was given a hook on its gradient, which the trainer would not "
                "call; put it into the loss, or use torch's DistributedDataParallel"
            )
        self._copied = None

    def watched(self, on_record: Write, parts: Parts) -> Write:
        """The function, which gets a RuntimeError where it looks at values of the past."""

        def watch(record: Record) -> None:
            if isinstance(record, Back):  # steps that the module has seen come again
                self._steps = -1
            self._looks.watches, self._looks.is_late = True, not self._is_current(parts)
            taken = _taken(self.module, parts)
            try:
                with self.handing_on(parts), self._looks:
                    on_record(record)
            finally:
                self._looks.watches = False
            for what, one in _taken(self.module, parts).items():
                if one != taken.get(what):
                    raise RuntimeError(f"on_record changes {what}{_LOST}")

        return watch

    @contextmanager
    def handing_on(self, parts: Parts) -> Iterator[None]:
        """Give attributes that the program sets within this block, as a temperature or the ``p`` of
        a dropout, to the copies of the module that train and are compared."""
        before = _attributes(self.module)
        yield
        changed: dict[str, dict[str, Any]] = {}
        for (part, key), now in _attributes(self.module).items():
            old, (value, *_) = before.get((part, key), ()), now
            if len(old) != len(now) or any(a is not b for a, b in zip(old, now, strict=True)):
                changed.setdefault(part, {})[key] = value
                told = getattr(value, "__dict__", value)
                parts.asked.attributes[f"module.{part}.{key}".replace("..", ".")] = told
        if changed:
            shadow = cast("Shadow | None", parts.objects.shadow)
            for one in (*torch_layers(parts.model.layers.values()), shadow):
                if one:
                    one.follow(changed)

    def _is_current(self, parts: Parts) -> bool:
        return self._steps == parts.steps_done

    def _versions(self) -> list[tuple[int, int]]:
        """Version and sum of the bits of each parameter: ``p.data`` changes the bits alone."""
        return [(p._version, _bit_sum(p)) for p in self.module.parameters()]


class _Looks(TorchFunctionMode):
    """Watches who looks at a module's values; costs a microsecond or so for each call of torch.

    Attributes:
        watches: whether a program's function is watched now.
        is_late: whether its values are of the past.
        rests: whether it gets the values of training now.
    """

    watches = is_late = rests = False

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        tensors = [p for p in module.parameters() if p.requires_grad] + list(module.buffers())
        self._tensors = {id(one): one for one in tensors}
        self._memory = {one.untyped_storage().data_ptr() for one in tensors if one.numel()}

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call a function; RuntimeError if it reads values of the past, or changes values."""
        given = dict(kwargs or {})
        if not self.rests and function not in _ABOUT:
            if self.is_late and any(id(one) in self._tensors for one in tree_leaves((args, given))):
                raise RuntimeError(_STALE)
            if _changes(function) and any(map(self._is_own, tree_leaves(args[:1]))):
                raise RuntimeError(
                    "on_record changes the trainer's module, and training goes on with values of "
                    "its own; call end(reason), change them after fit(), and begin another trainer "
                    "with the module and torch_optimizer()"
                )
        return function(*args, **given)

    def _is_own(self, value: object) -> bool:
        """Whether a tensor lies in the module's memory."""
        return (
            isinstance(value, torch.Tensor)
            and value.layout == torch.strided
            and value.untyped_storage().data_ptr() in self._memory
        )


def _taken(module: torch.nn.Module, parts: Parts) -> dict[str, Any]:
    """The module's parts and the optimisers' options that the trainer has taken, by name."""
    found: dict[str, Any] = {}
    for name, part in module.named_modules():
        own = part._parameters | part._modules
        found[f"parameters or parts of the trainer's module, in {name or type(part).__name__}"] = [
            (key, id(one), getattr(one, "requires_grad", None)) for key, one in own.items()
        ]
    given = parts.objects
    for made in (getattr(given.optimizer, "like", None), getattr(given.shadow, "optimizer", None)):
        for number, group in enumerate(made.param_groups if made else ()):
            options = {key: one for key, one in group.items() if key != "params"}
            found[f"group {number} of the optimizer"] = repr(options)  # also of tensors
    return found


def _attributes(module: torch.nn.Module) -> dict[tuple[str, str], list[Any]]:
    """Attributes of a module's parts but torch's own, by part and name, each before what it holds
    itself if that can change."""
    return {
        (part, key): [value, *_held(value)]
        for part, one in module.named_modules(remove_duplicate=False)
        for key, value in vars(one).items()
        if key not in _TORCHS
    }


def _held(value: Any) -> list[Any]:
    own = getattr(value, "__dict__", value)
    if isinstance(own, dict):
        return [*own.keys(), *own.values()]
    return [*own] if isinstance(own, list | set) else []


def _bit_sum(tensor: torch.Tensor) -> int:
    """Sum of a tensor's bits as integers, in any memory; no order of summation changes it."""
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(tensor.element_size(), torch.int64)
    return int(tensor.detach().contiguous().reshape(-1).view(kind).sum())


def _changes(function: Any) -> bool:
    """Whether a function of torch changes its first argument."""
    name: str = getattr(function, "__name__", "")
    return name in ("__setitem__", "__set__") or (name.endswith("_") and not name.endswith("__"))
