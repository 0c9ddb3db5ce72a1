"""DDP's hooks in C++ that want futures of C++, which no backend in Python can give."""

import functools
from typing import Any

import torch
import torch.distributed as dist


@functools.cache
def take_built_in_hooks() -> None:
    """Lets ``_register_builtin_comm_hook(FP16_COMPRESS)`` of a module over a group of ours register
    torch's hook in Python that does the same."""
    kind: Any = torch.nn.parallel.DistributedDataParallel
    register = kind._register_builtin_comm_hook

    @functools.wraps(register)
    def _register_builtin_comm_hook(self: Any, hook: Any) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        from collectives.torch.backend import backend_of

        if hook == dist.BuiltinCommHookType.FP16_COMPRESS and backend_of(self.process_group):
            self.register_comm_hook(self.process_group, fp16_compress_hook)
        else:
            register(self, hook)

    kind._register_builtin_comm_hook = _register_builtin_comm_hook
