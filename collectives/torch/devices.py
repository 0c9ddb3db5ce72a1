"""Tensors on a GPU: they pass through memory of the host, in the order of torch's streams."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from operator import attrgetter
from typing import Any

import torch

#: Whether collectives can read a tensor's memory where it lies; in C, as each small call asks.
is_on_host: Callable[[torch.Tensor], bool] = attrgetter("is_cpu")


def device_types() -> list[str]:
    """Types of the devices whose tensors the backend takes: the CPU, and what torch is made for."""
    gpu = torch.accelerator.current_accelerator()
    return ["cpu"] if gpu is None else ["cpu", gpu.type]


def empty_on_host(items: int, dtype: torch.dtype, *, pinned: bool) -> torch.Tensor:
    """A tensor of the host; ``pinned``: a GPU copies to it and from it faster."""
    pinned = pinned and torch.accelerator.is_available()
    return torch.empty(items, dtype=dtype, device="cpu", pin_memory=pinned)


def behind(call: Callable[..., None], *tensors: Any) -> Callable[..., None]:
    """The call, carried out after all that the caller has queued so far for these tensors.

    Its copies go to a stream of their own, so that they pass later work of the caller; they are
    done at its end, which waits for them.

    Args:
        tensors: tensors, or lists of them; other values are passed over.
    """
    devices = devices_of(tensors)
    if not devices:
        return call
    events = [torch.accelerator.current_stream(device).record_event() for device in devices]

    def run(*arguments: Any) -> None:
        with ExitStack() as copies:
            for event in events:
                stream = torch.Stream(device=event.device)
                stream.wait_event(event)
                copies.enter_context(stream)
                copies.callback(stream.synchronize)  # where the call raises, too
            call(*arguments)

    return run


def devices_of(values: Any) -> list[torch.device]:
    """The devices beside the host on which some of these tensors lie."""
    return list({one.device: None for one in tensors_of(values) if not is_on_host(one)})


def tensors_of(values: Any) -> Iterator[torch.Tensor]:
    """The tensors in lists of lists; other values are passed over."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from tensors_of(value)
