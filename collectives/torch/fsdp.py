"""FSDP2's buffers in memory that the ranks of a node share, without a call in the program."""

import functools
import importlib.util
import logging
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

log = logging.getLogger("collectives")

_MODULE = "torch.distributed.fsdp._fully_shard._fsdp_param_group"
_TAKES = "set_allocate_memory_from_process_group"


def take_buffers_from_groups() -> None:
    """Lets what ``fully_shard`` shards over a group of ours take its buffers from that group.

    It is what ``module.set_allocate_memory_from_process_group_for_comm(True)`` does, and the same
    call with False undoes it.  FSDP2 is not imported here, as that takes half as long as torch.
    """
    if _MODULE in sys.modules:
        _change(sys.modules[_MODULE])
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Changes the module as soon as a program has imported it."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            run = loader.exec_module

            def exec_module(module: Any) -> None:
                run(module)
                _change(module)

            loader.exec_module = exec_module
        return spec


def _change(module: Any) -> None:
    kind: Any = getattr(module, "FSDPParamGroup", None)
    if not hasattr(kind, _TAKES):
        log.info("FSDP2 of this torch takes no buffers from its groups")
        return
    begin = kind.__init__
    if getattr(begin, "takes_buffers", False):
        return

    @functools.wraps(begin)
    def __init__(self: Any, *args: Any, **named: Any) -> None:
        from collectives.torch.backend import backend_of

        begin(self, *args, **named)
        group = getattr(self.mesh_info, "shard_process_group", None)  # replicas have none
        if self.device.type == "cpu" and group is not None and backend_of(group):
            getattr(self, _TAKES)(True)

    __init__.takes_buffers = True  # type: ignore[attr-defined]
    kind.__init__ = __init__
