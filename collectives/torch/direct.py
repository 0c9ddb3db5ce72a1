"""The way from torch's calls into the backend's methods: past the compiler, and past C++."""

import functools
from collections.abc import Callable
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
        kinds: classes whose methods are called so; but for barriers, which have no tensor.
    """
    for name in {name for kind in kinds for name in vars(kind)} - {"barrier"}:
        theirs = vars(dist.ProcessGroup).get(name)
        if callable(theirs):
            setattr(dist.ProcessGroup, name, outside_dynamo(_direct(backend, name, theirs)))


def _direct(kind: type, name: str, theirs: Callable[..., Any]) -> Callable[..., Any]:
    def call(group: Any, *args: Any, **named: Any) -> Any:
        if type(group) is dist.ProcessGroup and _is_on_cpu(args):
            backend = group._get_backend(_CPU)
            if isinstance(backend, kind):
                return getattr(backend, name)(*args, **named)
        return theirs(group, *args, **named)

    return functools.update_wrapper(call, theirs)


def _is_on_cpu(value: Any) -> bool:
    """Whether an argument, or a tensor in arguments, is of the CPU."""
    if isinstance(value, list | tuple):
        return any(_is_on_cpu(part) for part in value)
    return bool(getattr(value, "device", value) == _CPU)
