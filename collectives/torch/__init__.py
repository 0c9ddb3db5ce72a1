"""A backend of ``torch.distributed`` over MPI: any script for PyTorch, started by ``mpirun``.

``mpirun -n 4 python -m collectives.torch script.py`` runs a script as it is.  A program that names
the backend itself calls ``init_process_group("collectives", "mpi://")``; nothing is imported for
that, as the package's entry points tell torch of the name.

Importing this package imports neither torch nor MPI.
"""

from importlib import import_module
from typing import Any

#: Name of the backend in ``init_process_group``.
NAME = "collectives"


#: Modules of the names that need torch.
_WHERE = {"backend_of": "backend", "name_ranks": "__main__", "take_over": "register"}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)


__all__ = ["NAME"]
