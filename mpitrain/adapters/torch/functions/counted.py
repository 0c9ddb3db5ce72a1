"""Operations of what torch computes."""

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry


class _Counter(TorchDispatchMode):
    """Torch's FlopCounterMode refuses ``autograd.grad``, and leaves a CPU's attention out."""

    found = 0
    counts = {str(kind): count for kind, count in flop_registry.items()}  # noqa: RUF012

    def __torch_dispatch__(
        self, call: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        y = call(*args, **(kwargs := kwargs or {}))
        if count := self.counts.get(str(call._overloadpacket).replace("_for_cpu", "")):
            self.found += count(*args, **kwargs, out_val=y)
        return y


def counted(compute: Callable[[], object]) -> int:
    """Operations of torch's products of matrices while ``compute`` runs."""
    with _Counter() as counter:
        compute()
    return counter.found
