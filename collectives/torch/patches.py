"""Changes in torch's own classes, by which its calls, FSDP2 and DDP reach the backend."""

import functools
import logging
import weakref
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist

from collectives.run.program import when_imported

log = logging.getLogger("collectives")

_MODULE = "torch.distributed.fsdp._fully_shard._fsdp_param_group"
_TAKES = "set_allocate_memory_from_process_group"


def hide_from_dynamo(*hidden: Any) -> None:
    """Lets ``torch.compile`` trace neither these functions nor what they call, as it would where a
    compiled module's hooks call them, or torch's C++ waits for a work.

    A class stands for its own methods.  Other things are passed over.  Unlike
    ``torch._dynamo.disable`` it costs a call nothing, and has no import of 1.5 s.  Where a torch
    has it no more, it traces them.
    """
    try:
        from torch._C._dynamo import eval_frame

        skip = eval_frame._FrameAction.SKIP
        strategy = eval_frame._FrameExecStrategy(skip, skip)
    except (ImportError, AttributeError):
        log.info("torch.compile of this torch traces the calls of its groups")
        return
    for each in hidden:
        for function in vars(each).values() if isinstance(each, type) else [each]:
            if isinstance(function, FunctionType):
                eval_frame.set_code_exec_strategy(function.__code__, strategy)


@functools.cache
def call_directly(backend: type, kinds: tuple[type, ...]) -> None:
    """Lets torch's groups, from torch 2.14 on, call a backend without C++ between them.

    C++ would hand out works that never say that they are complete, nor who sent a message.

    Args:
        backend: class of the backend.
        kinds: classes whose methods are called so.
    """
    for name in {name for kind in kinds for name in vars(kind)}:
        theirs, ours = vars(dist.ProcessGroup).get(name), getattr(backend, name)
        if callable(theirs):
            setattr(dist.ProcessGroup, name, _direct(backend, ours, theirs))


def _direct(kind: type, ours: Callable[..., Any], theirs: Callable[..., Any]) -> Callable[..., Any]:
    def call(group: Any, *args: Any, **named: Any) -> Any:
        if type(group) is process_group and (where := _device((*args, *named.values()))):
            backend = group._get_backend(where)
            if isinstance(backend, kind):
                return ours(backend, *args, **named)
        return theirs(group, *args, **named)

    process_group = dist.ProcessGroup
    hide_from_dynamo(call)
    return functools.update_wrapper(call, theirs)


def _device(values: Sequence[Any]) -> torch.device | None:
    """The device of an argument, of a tensor in arguments or of options; the first that is one."""
    for value in values:
        if type(value) is list or type(value) is tuple:
            if found := _device(value):
                return found
        elif isinstance(found := getattr(value, "device", value), torch.device):
            return found
    return None


@functools.cache
def take_buffers_from_groups() -> None:
    """Lets what ``fully_shard`` shards over a group of ours take its buffers from that group.

    It is what ``module.set_allocate_memory_from_process_group_for_comm(True)`` does, and the same
    call with False undoes it.  FSDP2 is not imported here, as that takes half as long as torch.
    """
    when_imported(_MODULE, _change)


def _change(module: Any) -> None:
    kind: Any = getattr(module, "FSDPParamGroup", None)
    if not hasattr(kind, _TAKES):
        log.info("FSDP2 of this torch takes no buffers from its groups")
        return
    begin = kind.__init__

    @functools.wraps(begin)
    def __init__(self: Any, *args: Any, **named: Any) -> None:
        from collectives.torch.backend import backend_of

        begin(self, *args, **named)
        group = getattr(self.mesh_info, "shard_process_group", None)  # replicas have none
        if self.device.type == "cpu" and group is not None and backend_of(group):
            getattr(self, _TAKES)(True)

    hide_from_dynamo(__init__)
    kind.__init__ = __init__


@functools.cache
def serve_replicas() -> None:
    """Lets ``_register_builtin_comm_hook(FP16_COMPRESS)`` of a module over a group of ours register
    torch's hook in Python that does the same, and keeps the work by which a module in ``join()``
    says that it goes on until its next one: DDP's reducer keeps the half in C++ alone."""
    kind: Any = torch.nn.parallel.DistributedDataParallel
    join: Any = torch.distributed.algorithms.join.Join
    register, notify = kind._register_builtin_comm_hook, join.notify_join_context
    works = weakref.WeakKeyDictionary[Any, Any]()

    @functools.wraps(register)
    def _register_builtin_comm_hook(self: Any, hook: Any) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        from collectives.torch.backend import backend_of

        if hook == dist.BuiltinCommHookType.FP16_COMPRESS and backend_of(self.process_group):
            self.register_comm_hook(self.process_group, fp16_compress_hook)
        else:
            register(self, hook)

    @functools.wraps(notify)
    def notify_join_context(joinable: Any) -> Any:
        works[joinable] = work = notify(joinable)
        return work

    hide_from_dynamo(_register_builtin_comm_hook, notify_join_context)
    kind._register_builtin_comm_hook = _register_builtin_comm_hook
    join.notify_join_context = staticmethod(notify_join_context)
