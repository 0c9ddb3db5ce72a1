"""Codes of gradients in a loop of one's own: a communication hook, as torch's PowerSGD is one."""

from collections.abc import Mapping

import msgspec
import torch

from collectives.codec import Dice
from collectives.communicator import Communicator
from mpitrain.adapters.torch.arrays import as_array, as_tensor
from mpitrain.adapters.torch.hooks import GradBucket
from mpitrain.adapters.torch.replica import DataParallel
from mpitrain.compress import CodecError, Momentum, parse
from mpitrain.config import Compress
from mpitrain.config.validation import codec_faults
from mpitrain.parallel.arena import DATA, Bucket
from mpitrain.parallel.compressed import Compressed, Exchange
from mpitrain.parallel.summation import Dense, Sum, Summand
from mpitrain.training.build import compression

_CODED = (torch.float32, torch.float64)


class Compression:
    """The state of :func:`compression_hook`: what codes gradients, and what codes have left out.

        state = Compression(net, "powersgd:rank=4")
        net.register_comm_hook(state, compression_hook)

    Where a gradient of any rank is not finite, neither is the mean, on all ranks, and what was left
    out stays as it was.  It is in units of the gradients: a loss scale (``GradScaler``) must not
    change.

    Attributes:
        steps: backward passes so far, of which the dice depend.
    """

    def __init__(
        self,
        net: DataParallel,
        codec: str,
        *,
        start: int = 0,
        least: int = 1024,
        exchange: str = "auto",
        feedback: str = "auto",
        seed: int = 0,
    ) -> None:
        """Choose the code; arguments as those of the table ``[compress]`` of a job.

        Raises:
            ValueError: there is no such code, or it does not go with the other arguments.
        """
        if codec in ("none", "auto"):
            raise CodecError(f"{codec!r} is no code; leave the hook out, or name one")
        try:
            table = msgspec.convert(
                dict(codec=codec, start=start, least=least, exchange=exchange, feedback=feedback),
                Compress,
            )
            if isinstance(code := parse(codec), Momentum) and code.clip:
                raise CodecError(
                    f"codec = {codec!r}: the clip is of the whole gradient, of which a hook has a "
                    "bucket; leave it out"
                )
            for _, why in codec_faults(table, code):
                raise CodecError(f"codec = {codec!r}: {why}")
        except msgspec.ValidationError as error:
            raise CodecError(str(error)) from error
        self._comm: Communicator
        self._comm, self._under_way = net.under_way
        self._summation = Compressed(
            compression(table), Dice(seed, self._comm.rank), Dense(), tells=True
        )
        self._sums: dict[int, tuple[int, Sum]] = {}
        self._start = 0
        self._loaded: dict[str, torch.Tensor] = {}
        self.steps = 0

    def begin(self, bucket: GradBucket) -> torch.futures.Future[list[torch.Tensor]]:
        """Start to average a bucket; collective.

        Raises:
            RuntimeError: its parameters are others than when the hook was registered.
        """
        buffer, index = bucket.buffer(), bucket.index()
        if index == 0:
            if self._sums and self._loaded:
                raise RuntimeError(
                    f"state of {', '.join(sorted(self._loaded)[:3])} was loaded, and no gradients "
                    "are coded so; load it into a Compression of the same codec, of a DataParallel "
                    "with the same bucket_bytes"
                )
            self.steps += 1
        buffer.div_(self._comm.size)
        if buffer.dtype not in _CODED:
            return self._under_way.all_reduce(buffer)
        address, found = self._sums.get(index) or self._bind(bucket)
        if address != buffer.data_ptr():
            raise RuntimeError(
                "the module has other parameters than when its gradients were first coded; make "
                "another DataParallel, with another Compression"
            )
        self._summation.dice.step = self.steps - 1
        found.Start()
        ended = None
        if isinstance(found, Exchange):

            def ended(exchange: Exchange = found) -> None:
                (exchange.commit if exchange.is_finite else exchange.rollback)()

        return self._under_way.add(found, buffer, ended)

    def _bind(self, bucket: GradBucket) -> tuple[int, Sum]:
        buffer = bucket.buffer()
        if buffer.is_cuda:
            raise TypeError(
                f"the gradients lie on {buffer.device}, and codes are made on the host; leave the "
                "hook out, or keep the module on the CPU"
            )
        own, start = as_array(buffer), self._start
        self._start += own.size
        tensors = {
            f"bucket{bucket.index()}.{number}": as_array(gradient)
            for number, gradient in enumerate(bucket.gradients())
        }
        where = Bucket(start, self._start, frozenset(), DATA)
        found = self._summation.bind(Summand(where, self._comm, own, tensors, own))
        self._sums[bucket.index()] = buffer.data_ptr(), found
        for name, values in self._kept().items():
            if name in self._loaded:
                saved = self._loaded.pop(name)
                if saved.shape != values.shape:
                    raise RuntimeError(
                        f"state of {name} has shape {tuple(saved.shape)}, and what is coded so "
                        f"{tuple(values.shape)}; take a DataParallel with the same bucket_bytes"
                    )
                values.copy_(saved)
        return self._sums[bucket.index()]

    def _kept(self) -> dict[str, torch.Tensor]:
        """What is kept, by name, as views."""
        found = {
            f"{kept.name}.{kept.start}": as_tensor(kept.values) for kept in self._summation.kept()
        }
        return found | {name: as_tensor(array) for name, array in self._summation.state().items()}

    def state_dict(self) -> dict[str, torch.Tensor]:
        """What this rank must save to go on bit by bit; each rank has its own."""
        kept = {name: values.clone() for name, values in self._kept().items()}
        return {"steps": torch.tensor(self.steps), **self._loaded, **kept}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go on from what this rank has saved, before the first backward pass.

        Raises:
            RuntimeError: there was one.
        """
        if self._sums:
            raise RuntimeError("gradients were coded already; load before the first backward()")
        self._loaded = dict(state)
        self.steps = int(self._loaded.pop("steps"))

    def close(self) -> None:
        """Free what is bound; collective, before ``net.close()``."""
        while self._sums:
            self._sums.popitem()[1][1].Free()


def compression_hook(
    state: Compression, bucket: GradBucket
) -> torch.futures.Future[list[torch.Tensor]]:
    """For ``DataParallel.register_comm_hook``: the mean of a bucket by codes."""
    return state.begin(bucket)
