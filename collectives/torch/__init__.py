"""A backend of ``torch.distributed`` over MPI: any script for PyTorch, started by ``mpirun``.

``mpirun -n 4 python -m collectives.torch script.py`` runs a script as it is.  A program that names
the backend itself calls ``init_process_group("collectives", "mpi://")``; nothing is imported for
that, as the package's entry points tell torch of the name.

Importing this package imports neither torch nor MPI.
"""

from collectives.extras import names_of

#: Name of the backend in ``init_process_group``.
NAME = "collectives"
__getattr__, __dir__ = names_of(
    __name__,
    {
        "collectives.torch.backend": "backend_of",
        "collectives.torch.__main__": "name_ranks",
        "collectives.torch.register": "take_over",
    },
)

__all__ = ["NAME"]
