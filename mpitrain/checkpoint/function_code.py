"""A function's own code: its digest, the names that it reads, and their values.

Code of installed packages is told apart from the program's.
"""

import dis
import hashlib
import inspect
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

#: Folders of our packages, wherever they lie.
_OURS = tuple(str(Path(__file__).parents[2] / name) for name in ("mpitrain", "collectives"))


def hashed(data: Any) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def code_digest(code: CodeType, doc: str | None) -> str:
    """Digest of a function without its docstring and the names of local variables."""

    def plain(constant: Any) -> str:
        if isinstance(constant, CodeType):
            return code_digest(constant, None)
        if isinstance(constant, frozenset):
            return repr(sorted(map(repr, constant)))
        return repr(constant)

    constants = list(code.co_consts)
    if doc is not None and constants and constants[0] == doc:
        constants[0] = None
    told = code.co_code, code.co_names, tuple(map(plain, constants)), code.co_argcount
    return hashed(repr(told).encode())


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def names_read(function: Any) -> frozenset[str]:
    """Attributes and globals that a function reads."""
    code = getattr(function, "__code__", None)
    return frozenset(name for one in _codes(code) for name in one.co_names) if code else frozenset()


def surroundings(function: FunctionType) -> dict[str, Any]:
    """Values by name of the closure, the module's globals and the defaults of a function."""
    found: dict[str, Any] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        with suppress(ValueError):  # it is empty still
            found[name] = cell.cell_contents
    loaded = {
        one.argval
        for code in _codes(function.__code__)
        for one in dis.get_instructions(code)
        if one.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    }
    there = function.__globals__
    found |= {name: there[name] for name in sorted(loaded & there.keys())}
    for name, one in inspect.signature(function, follow_wrapped=False).parameters.items():
        if one.default is not one.empty:
            found[name] = one.default
    return {name: value for name, value in found.items() if name not in ("__class__", "self")}


def functions_of(member: Any) -> list[FunctionType]:
    """Functions of a member of a class: a method, or a property's."""
    found = [member, *(getattr(member, key, None) for key in ("__func__", "fget", "func"))]
    return [unwrapped(one) for one in found if isinstance(one, FunctionType)]


def unwrapped(function: Any) -> Any:
    """Function inside the decorators of packages, as ``torch.no_grad()``."""
    while is_installed(function) and hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


def package_of(what: Any) -> str:
    return str(getattr(what, "__module__", None) or "").partition(".")[0]


def is_installed(what: Any) -> bool:
    """Whether a class or a function belongs to an installed package, and not to the program."""
    if isinstance(what, type):  # a program may run in the module of a package's command
        written = (
            one
            for one in vars(what).values()
            # Data classes generate functions, which are in no file.
            if isinstance(one, FunctionType) and not one.__code__.co_filename.startswith("<")
        )
        what = next(written, what)
    if isinstance(what, FunctionType):  # its module may be that of a decorator
        file = what.__code__.co_filename
    else:
        module = sys.modules.get(getattr(what, "__module__", None) or "")
        file = getattr(module, "__file__", None) or ""
        if not file:
            return package_of(what) != "__main__"
    if any(part in file for part in ("site-packages", "dist-packages", "<frozen ")):
        return True
    return file.startswith((sysconfig.get_path("stdlib"), *_OURS))
