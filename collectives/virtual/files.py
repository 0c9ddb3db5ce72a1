"""Files of MPI that virtual ranks open together."""

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

from mpi4py import MPI as library

from collectives.virtual.communicator import Comm, Group
from collectives.virtual.requests import Handled, Null, lacks

#: Calls of all ranks, beside those whose names end so.
_TOGETHER = ("_all", "Sync", "Set_size", "Set_view", "Set_atomicity", "Preallocate")
#: What the first rank alone does for all.
_ONCE = library.MODE_CREATE | library.MODE_EXCL | library.MODE_DELETE_ON_CLOSE


class _Opened(NamedTuple):
    """The ranks that have opened a file, and MPI's own of this rank alone."""

    comm: Comm
    file: library.File


class File(Handled):
    """A file, which each rank opens for itself; calls of all ranks begin and end together."""

    theirs, null = library.File, Null(library.ERR_FILE)
    Delete = library.File.Delete
    group = property(lambda self: self.handle.comm.group)
    group_size = property(lambda self: self.handle.comm.size)
    group_rank = property(lambda self: self.handle.comm.rank)

    @classmethod
    def Open(
        cls, comm: Comm, filename: Any, amode: int = library.MODE_RDONLY, info: Any = None
    ) -> "File":
        given = library.INFO_NULL if info is None else info
        made, failed = cls.of(None), None
        for first in (True, False):  # the first rank creates it
            if failed is None and first == (comm.rank == 0):
                mode = amode if first else amode & ~_ONCE
                try:
                    file = library.File.Open(library.COMM_SELF, filename, mode, given)
                    made.handle = _Opened(comm, file)
                except library.Exception as error:
                    failed = error.Get_error_code()
            failed = next((code for code in comm.allgather(failed) if code is not None), None)
        if failed is not None:
            raise library.Exception(failed)
        made.handle = made.handle._replace(comm=comm.Dup())
        return made

    def Get_group(self) -> Group:
        found: Group = self.group
        return found

    def Close(self) -> None:
        self._together(self.handle.file.Close)()
        self.handle.comm.Free()
        self.Free()

    def __getattr__(self, name: str) -> Any:
        own: Any = getattr(self.handle.file, name)
        if not callable(own):
            return own
        if name.startswith(("Iread", "Iwrite")) or name.endswith("shared") or "ordered" in name:
            return lacks("File", name)
        return self._together(own) if name.endswith(_TOGETHER) else own

    def _together(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(*given: Any, **named: Any) -> Any:
            self.handle.comm.Barrier()
            found = method(*given, **named)
            self.handle.comm.Barrier()
            return found

        return call
