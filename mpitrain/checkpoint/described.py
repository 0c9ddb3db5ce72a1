"""Texts that describe a program's own objects, so that another process can compare them.

A function is described by its bytecode, its constants, the names that it reads, and the values of
globals, closures and defaults.  Files, lines, docstrings and names of local variables do not count.
Code of installed packages is described by its name, as a new version of it is no other job.
"""

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np

from mpitrain.checkpoint.function_code import (
    code_digest,
    functions_of,
    hashed,
    is_installed,
    names_read,
    package_of,
    surroundings,
    unwrapped,
)

#: Methods that packages call by name; the methods that these call are found in their code.
_ENTRIES = frozenset({
    "forward", "backward", "gradients", "parameters", "state", "output_shape", "shapes",
    "prepare", "apply", "ratio", "add", "value", "starting_at", "set_epoch",
    "__call__", "__getitem__", "__getitems__", "__iter__", "__next__", "__getattr__",
})  # fmt: skip
#: Methods that decide on no number.
_SILENT = frozenset({"extra_repr", "state_dict", "load_state_dict", "__init__", "__repr__"})
#: Modules of objects that carry a job out and are no part of it.
_RUNNERS = (
    "collectives.", "mpi4py.", "mpitrain.training.", "mpitrain.server.", "mpitrain.federated.",
    "mpitrain.trainer", "mpitrain.ranks.", "mpitrain.metrics.",
)  # fmt: skip
#: Time before which no program that imports this has begun.
_BEGUN = time.time() - 600
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
#: Shown characters of a value, depth of values within one another, and values of a container.
_SHOWN, _DEPTH, _MOST = 100, 8, 1000


def digest(array: Any) -> str:
    """Type, shape and digest of an array or a tensor, in any memory."""
    if hasattr(array, "detach"):  # a tensor of torch
        array = array.detach().cpu().contiguous()
        kind = str(array.dtype).removeprefix("torch.")
        data = array.reshape(-1).view(sys.modules["torch"].uint8).numpy()
    else:
        array = np.ascontiguousarray(array)
        kind, data = str(array.dtype), array.reshape(-1).view(np.uint8)
    return f"{kind} of shape {tuple(array.shape)} with digest {hashed(data)}"


@dataclass
class Description:
    """Texts by name.

    Attributes:
        parts: kinds and values; a part that only one of two jobs has makes them differ.
        options: options of parts; one that only one of two jobs has is new in a package.
        code: digests of functions, compared as ``parts``.
        values: whether values of arrays are included.
    """

    parts: dict[str, str] = field(default_factory=dict)
    options: dict[str, str] = field(default_factory=dict)
    code: dict[str, str] = field(default_factory=dict)
    values: bool = True
    #: Objects by their ``id``, kept alive so that it stays theirs; names that a class reads.
    _done: dict[int, tuple[Any, frozenset[str]]] = field(default_factory=dict)

    def add(self, name: str, what: Any, read: frozenset[str] = frozenset(), depth: int = 0) -> None:
        """Adds an object and everything that it consists of.

        ``name`` begins its keys, ``read`` are attributes that its user reads, and ``depth`` is the
        number of objects around it.
        """
        if (text := _plain(what)) is not None:
            # Paths and the time of the start do not count.
            if not ("/" in text or "\\" in text or _is_time(what)):
                self.options[name] = _short(text)
        elif depth > _DEPTH or isinstance(what, ModuleType) or _runs(what):
            return
        elif hasattr(what, "shape") and hasattr(what, "dtype"):
            self.add_array(name, what)
        elif isinstance(what, Mapping | list | tuple | set | frozenset):
            self._add_several(name, what, read, depth)
        elif id(what) not in self._done:
            self._done[id(what)] = what, frozenset()
            self._add_object(name, what, read, depth)

    def add_array(self, name: str, array: Any) -> None:
        """Adds the values of an array or a tensor."""
        if self.values:
            try:
                self.parts[f"values of {name}"] = digest(array)
            except (TypeError, ValueError, RuntimeError):  # a kind that has no bytes
                self.parts[name] = type(array).__qualname__

    def add_module(self, name: str, module: Any, depth: int = 0) -> None:
        """Adds a torch module, part by part, without the values of parameters and buffers."""
        for own, part in module.named_modules():
            full = f"{name}.{own}" if own else name
            self.parts[full] = type(part).__qualname__
            self._add_methods(full, type(part), depth)
            for key, value in vars(part).items():
                if not key.startswith("_") and key != "training":
                    self.add(f"{full}.{key}", value, depth=depth + 1)
            for key in _HOOKS:
                for number, hook in enumerate((vars(part).get(key) or {}).values()):
                    self.add(f"{full}.{key.strip('_')}.{number}", hook, depth=depth + 1)

    def _add_several(self, name: str, several: Any, read: frozenset[str], depth: int) -> None:
        if isinstance(several, set | frozenset):
            several = sorted(several, key=str)
        is_mapping = isinstance(several, Mapping)
        texts = [None] if is_mapping else [_plain(one) for one in several]
        if None not in texts:
            self.options[name] = _short(f"[{', '.join(map(str, texts))}]")
        elif len(several) > _MOST:
            self.options[name] = f"{len(several)} values"
        else:
            for key, one in several.items() if is_mapping else enumerate(several):
                self.add(f"{name}.{key}", one, read, depth + 1)

    def _add_object(self, name: str, what: Any, read: frozenset[str], depth: int) -> None:
        if isinstance(what, partial):
            self.add(name, what.func, read, depth + 1)
            self.add(f"{name}.args", what.args, read, depth + 1)
            self.add(f"{name}.keywords", what.keywords, read, depth + 1)
        elif isinstance(what, MethodType):
            self._add_function(f"{name}.{what.__name__}", what.__func__, depth)
            self.add(name, what.__self__, names_read(what.__func__), depth + 1)
        elif isinstance(what, FunctionType | BuiltinFunctionType):
            self._add_function(name, what, depth)
        elif isinstance(what, type):
            self.parts[name] = what.__qualname__
            self._add_methods(name, what, depth)
        elif hasattr(what, "named_modules") and hasattr(what, "named_buffers"):
            self.add_module(name, what, depth)
            for own, tensor in (*what.named_parameters(), *what.named_buffers()):
                self.add_array(f"{name}.{own}", tensor)
        elif hasattr(what, "whole") and package_of(type(what)) == "mpitrain":
            if what.whole is not None:  # else another layer of the module describes it
                self.add_module(name.removesuffix(".part0"), what.whole, depth)
        else:
            self._add_instance(name, what, read, depth)

    def _add_instance(self, name: str, what: Any, read: frozenset[str], depth: int) -> None:
        kind = type(what)
        self.parts[name] = kind.__qualname__
        read |= self._add_methods(name, kind, depth)
        # Public attributes describe a package's callable object, as a transform; those of others,
        # as a table of data, include paths, caches and counters.
        shows = package_of(kind) == "mpitrain" or (is_installed(kind) and callable(what))
        for key, value in getattr(what, "__dict__", {}).items():
            if key in read or (not key.startswith("_") and (shows or callable(value))):
                self.add(f"{name}.{key}", value, read, depth + 1)

    def _add_methods(self, name: str, kind: type, depth: int) -> frozenset[str]:
        """Adds methods of a class that others call, and those that these call.

        Returns the names that their code reads.
        """
        if id(kind) in self._done and self._done[id(kind)][1]:
            return self._done[id(kind)][1]
        own: dict[str, Any] = {}
        for one in reversed(kind.__mro__):
            own = {key: value for key, value in own.items() if key not in vars(one)}
            own |= {} if is_installed(one) else vars(one)
        bases = [one for one in kind.__mro__ if is_installed(one) and one is not object]
        due = [key for key in own if key in _ENTRIES or any(key in vars(base) for base in bases)]
        read: set[str] = set()
        done = set(_SILENT)
        while due:
            key = due.pop()
            if key in done:
                continue
            done.add(key)
            functions = functions_of(own[key])
            for function in functions:
                names = names_read(function)
                read |= names
                due += sorted(names & own.keys())
                self._add_function(f"{name}.{key}", function, depth)
            if not functions and not key.startswith("__"):
                self.add(f"{name}.{key}", own[key], depth=depth + 1)
        self._done[id(kind)] = kind, frozenset(read)
        return frozenset(read)

    def _add_function(self, name: str, function: Any, depth: int) -> None:
        function = unwrapped(function)
        if is_installed(function) or not isinstance(function, FunctionType):
            self.parts[name] = getattr(function, "__qualname__", type(function).__qualname__)
            return
        self.code[f"code of {name}"] = code_digest(function.__code__, function.__doc__)
        for key, value in surroundings(function).items():
            self.add(f"{name}.{key}", value, names_read(function), depth + 1)


def _runs(what: Any) -> bool:
    """Whether it carries a job out, as a trainer or a communicator."""
    return any(kind.__module__.startswith(_RUNNERS) for kind in type(what).__mro__)


def _plain(what: Any) -> str | None:
    """Text of a single value; None for other objects."""
    if isinstance(what, Enum | np.dtype) or type(what).__name__ == "dtype":  # torch's, too
        return str(what)
    if what is None or isinstance(what, bool | int | float | complex | str | bytes | range | slice):
        return repr(what)
    return repr(what.item()) if isinstance(what, np.generic) else None


def _is_time(what: Any) -> bool:
    """Whether it is a time of the clock since the program began."""
    return isinstance(what, float) and not what.is_integer() and _BEGUN <= what <= time.time()


def _short(text: str) -> str:
    """A text, or the beginning and the digest of a long one."""
    if len(text) <= _SHOWN:
        return text
    return f"{text[:_SHOWN]}... with digest {hashed(text.encode())}"
