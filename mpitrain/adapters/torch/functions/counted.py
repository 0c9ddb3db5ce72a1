"""Operations of what torch computes."""

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry


class _Counter(TorchDispatchMode):
    """Counts as torch's FlopCounterMode does, whose hooks refuse ``torch.autograd.grad``."""

    found = 0

    def __torch_dispatch__(
        self, call: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        y = call(*args, **named)
        if count := flop_registry.get(call._overloadpacket):
            self.found += count(*args, **named, out_val=y)
        return y


def counted(compute: Callable[[], object]) -> int:
    """Operations of torch's products of matrices and convolutions while ``compute`` runs."""
    with _Counter() as counter:
        compute()
    return counter.found
