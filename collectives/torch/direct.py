"""The way from torch's calls into the backend's methods: past the compiler, and past C++."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

_CPU = torch.device("cpu")


def outside_dynamo(method: Callable[..., Any]) -> Callable[..., Any]:
    """Hides a method from ``torch.compile``, which traces what a compiled module's hooks call.

    It does what ``torch._dynamo.disable`` does, in 0.1 us in the place of 0.8, and without its
    import of 1.5 s.
    """
    from torch._C._dynamo import eval_frame

    def call(*args: Any, **named: Any) -> Any:
        before = set_eval_frame(None)
        try:
            return method(*args, **named)
        finally:
            set_eval_frame(before)

    set_eval_frame = eval_frame.set_eval_frame
    action = eval_frame._FrameAction
    skip = eval_frame._FrameExecStrategy(action.SKIP, action.DEFAULT)
    eval_frame.set_code_exec_strategy(call.__code__, skip)
    return functools.update_wrapper(call, method)


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
            ours = inspect.unwrap(ours)
            setattr(dist.ProcessGroup, name, outside_dynamo(_direct(backend, ours, theirs)))


def _direct(kind: type, ours: Callable[..., Any], theirs: Callable[..., Any]) -> Callable[..., Any]:
    def call(group: Any, *args: Any, **named: Any) -> Any:
        if type(group) is process_group and _is_on_cpu((*args, *named.values())):
            backend = group._get_backend(_CPU)
            if isinstance(backend, kind):
                return ours(backend, *args, **named)
        return theirs(group, *args, **named)

    process_group = dist.ProcessGroup
    return functools.update_wrapper(call, theirs)


def _is_on_cpu(values: Sequence[Any]) -> bool:
    """Whether an argument, a tensor in arguments or the device of options is the CPU."""
    for value in values:
        if type(value) is list or type(value) is tuple:
            if _is_on_cpu(value):
                return True
        elif isinstance(value, torch.Tensor):
            if value.is_cpu:
                return True
        elif getattr(value, "device", value) == _CPU:
            return True
    return False
