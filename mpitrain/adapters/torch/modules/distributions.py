"""Numbers of torch's distributions, from integers of 64 random bits."""

from collections.abc import Callable, Mapping
from math import log1p, log2, pi
from typing import Any

import numpy as np
import torch

from mpitrain.adapters.torch.arrays import as_tensor
from mpitrain.arrays import Array, Shape

#: Arguments of an operator by the names in its schema.
Arguments = dict[str, Any]

#: Numbers of a distribution, from numbers that are uniform in the open interval (0, 1).
_OF_OPEN: Mapping[str, Callable[[torch.Tensor, Arguments], torch.Tensor]] = {
    "normal": lambda u, of: of["mean"] + of["std"] * torch.special.ndtri(u),
    "randn": lambda u, of: torch.special.ndtri(u),
    "log_normal": lambda u, of: (of["mean"] + of["std"] * torch.special.ndtri(u)).exp(),
    "exponential": lambda u, of: -u.log() / of["lambd"],
    "cauchy": lambda u, of: of["median"] + of["sigma"] * torch.tan(pi * (u - 0.5)),
    "geometric": lambda u, of: (u.log() / log1p(-of["p"])).ceil().clamp(min=1),
}
_OTHERS = frozenset({"bernoulli", "uniform", "rand", "randint", "random", "randperm"})


class Distributions:
    """Results of torch's operators that draw, from integers of 64 bits."""

    def __init__(self, bits: Callable[[Shape], Array], *, loud: bool) -> None:
        """Take integers from ``bits``, which gives as many as a shape has, in one axis.

        With ``loud``, each number is another one, rather than 0 or 1, where it is to be 1 with some
        probability.
        """
        self._bits, self._loud = bits, loud

    def of(self, operator: str, given: Arguments) -> Any:
        """The result of torch.ops.aten.``operator``, by its arguments; None: it is not known."""
        name = operator.removesuffix("_").removesuffix("_like")
        if name == "native_dropout":
            return self._dropout(given)
        if name == "rrelu_with_noise":
            return self._rrelu(given, in_place=operator.endswith("_"))
        if name == "multinomial":
            return self._multinomial(given)
        if name not in _OF_OPEN and name not in _OTHERS:
            return None
        target = _target(given, operator)
        if target.is_complex():
            return None
        return target.copy_(self._values(name, given, target))

    def _values(self, name: str, given: Arguments, target: torch.Tensor) -> torch.Tensor:
        """Numbers of a distribution, in the shape of a tensor that takes them."""
        shape = tuple(target.shape)
        if name in _OF_OPEN:
            return _OF_OPEN[name](self._open(shape), given)
        if name == "bernoulli":
            p = given["self"] if given.get("p") is None else given["p"]
            if self._loud and target.is_floating_point():
                return self._open(shape)
            if isinstance(p, torch.Tensor):
                return self._half_open(shape) < p
            return self._below(shape, p)
        if name in ("uniform", "rand"):
            low, high = given.get("from", 0.0), given.get("to", 1.0)
            return low + (high - low) * self._half_open(shape, target.dtype)
        whole = as_tensor((self._bits(shape) >> np.uint64(1)).astype(np.int64)).reshape(shape)
        if name == "randperm":
            return whole.argsort()
        low = given.get("low", given.get("from")) or 0
        end = given.get("high", given.get("to"))
        return low + whole % ((_end(target.dtype) if end is None else end) - low)

    def _dropout(self, given: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
        x, p = given["input"], given["p"]
        if self._loud:
            return x * self._open(tuple(x.shape)), torch.ones_like(x, dtype=torch.bool)
        kept = self._below(tuple(x.shape), 1 - p)
        return x * kept * (1 / (1 - p) if p < 1 else 0.0), kept

    def _rrelu(self, given: Arguments, *, in_place: bool) -> torch.Tensor:
        x, noise, low, high = (given[key] for key in ("self", "noise", "lower", "upper"))
        slopes = low + (high - low) * self._half_open(tuple(x.shape))
        noise.copy_(torch.where(x <= 0, slopes.to(x), torch.ones_like(x)))
        return x.mul_(noise) if in_place else x * noise

    def _multinomial(self, given: Arguments) -> torch.Tensor:
        """By the largest of log-probabilities with Gumbel noise (Gumbel 1954)."""
        weights, count = given["self"].double(), given["num_samples"]
        several = given["replacement"]
        shape = (*weights.shape[:-1], count, weights.shape[-1]) if several else weights.shape
        scores = (weights.unsqueeze(-2) if several else weights).log()
        scores = scores - (-self._open(tuple(shape)).log()).log()
        return scores.argmax(-1) if several else scores.topk(count, -1).indices

    def _below(self, shape: Shape, p: float) -> torch.Tensor:
        """Truths, each with the probability p."""
        bits = self._bits(shape)
        return as_tensor(bits < np.uint64(p * 2.0**64) if p < 1 else bits == bits).reshape(shape)

    def _open(self, shape: Shape) -> torch.Tensor:
        """Numbers between 0 and 1, without both."""
        bits = self._bits(shape) >> np.uint64(11)
        return as_tensor((bits + 0.5) * 2.0**-53).reshape(shape)

    def _half_open(self, shape: Shape, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        """Numbers from 0 to below 1, with as many digits as a type has."""
        digits = 1 - round(log2(torch.finfo(dtype).eps))
        bits = self._bits(shape) >> np.uint64(64 - digits)
        return as_tensor(bits * 2.0**-digits).reshape(shape)


def _target(given: Arguments, name: str) -> torch.Tensor:
    """The tensor that takes the numbers: the one that is given, or a new one."""
    if "out" in given:
        taken: torch.Tensor = given["out"]
        return taken.resize_(given["size"]) if "size" in given else taken
    like = given.get("self")
    if name.endswith("_"):
        assert isinstance(like, torch.Tensor)
        return like
    kinds = {"dtype": torch.dtype, "device": torch.device}  # a default type is a number
    options = {key: given[key] for key, kind in kinds.items() if isinstance(given.get(key), kind)}
    if like is not None:
        return torch.empty_like(like, **options)
    if name in ("randint", "randperm"):
        options = {"dtype": torch.int64} | options
    size = given.get("size")
    if name == "randperm":
        size = [given["n"]]
    if size is None:  # the means or the deviations are tensors
        each = [given[key] for key in ("mean", "std")]
        both = [one for one in each if isinstance(one, torch.Tensor)]
        return torch.empty_like(torch.broadcast_tensors(*both)[0].contiguous(), **options)
    return torch.empty(size, **options)


def _end(kind: torch.dtype) -> int:
    """Bound of ``random_()``, one above its largest number: a type has all whole numbers below."""
    if kind.is_floating_point:
        return 2 ** (1 - int(log2(torch.finfo(kind).eps))) + 1
    return 2 if kind == torch.bool else min(torch.iinfo(kind).max, 2**63 - 2) + 1
