"""A stand-in for torch's GPU: tensors of the host that the backend may not read where they lie."""

from collections.abc import Callable

import torch

from collectives.torch import devices, messages, order, reductions, tensors


class Event:
    """A place in a stream; who waits for it does what was queued before."""

    def __init__(self, device: torch.device, queued: list[Callable[[], None]]) -> None:
        self.device, self.queued = device, queued

    def reach(self) -> None:
        while self.queued:
            self.queued.pop(0)()


class Stream:
    """A stream whose work is done when somebody waits for it, and no earlier."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.queued: list[Callable[[], None]] = []
        self.is_done = True

    def record_event(self) -> Event:
        before, self.queued = self.queued, []
        return Event(self.device, before)

    def wait_event(self, event: Event) -> None:
        event.reach()
        self.is_done = False

    def synchronize(self) -> None:
        self.is_done = True

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        assert self.is_done, "nobody waits for the copies of a call"


class Elsewhere:
    """All tensors but those of the backend's own, and those of :meth:`here`, lie on one device.

    Attributes:
        stream: the current one, which a test may change.
    """

    def __init__(self, patch) -> None:
        self.stream = Stream(torch.device("cpu"))
        make = devices.empty_on_host

        def empty_on_host(*given, **named):
            return self.here(make(*given, **named))

        def is_on_host(tensor):
            return hasattr(tensor, "is_of_the_host")

        for module in (devices, reductions, tensors):
            patch.setattr(module, "is_on_host", is_on_host)
        patch.setattr(tensors, "empty_on_host", empty_on_host)
        for module in (messages, order):
            patch.setattr(module, "future_of", lambda value: torch.futures.Future())
        patch.setattr(torch.accelerator, "current_stream", lambda device: self.stream)
        patch.setattr(torch, "Stream", Stream)

    @staticmethod
    def here(tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, which is the host's from now on."""
        tensor.is_of_the_host = True
        return tensor
