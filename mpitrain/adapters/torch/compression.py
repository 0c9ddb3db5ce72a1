"""Codecs of gradients for torch's DistributedDataParallel, as a communication hook."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch.nn.parallel import DistributedDataParallel

from collectives.codec import Dice, slices
from collectives.torch import NAME, backend_of
from mpitrain.adapters.torch.arrays import NARROW, as_array, as_tensor
from mpitrain.compress import CodecError, parse
from mpitrain.compress.dgc import DGC
from mpitrain.config import Compress, ConfigError
from mpitrain.config.codecs import codec_faults
from mpitrain.config.reading import converted
from mpitrain.parallel.arena import DATA, Bucket
from mpitrain.parallel.coded_sum import CodedSum
from mpitrain.parallel.compressed_summation import CompressedSummation
from mpitrain.parallel.summation import Dense, KeptElements, Sum, Summand
from mpitrain.training.build import compression

_CODED = (torch.float32, torch.float64)


class Compression:
    """State of :func:`compression_hook`: the codec, and the parts of gradients left out so far.

        state = Compression(net, "powersgd:rank=4")
        net.register_comm_hook(state, compression_hook)

    ``net`` is on a group of the backend "collectives".  torch makes its buckets anew after the
    first backward pass, with ``static_graph`` after the second: until then gradients travel as they
    are, also in a loop that goes on from a saved state.  With ``find_unused_parameters=True`` and
    no ``static_graph``, all are coded.  Gradients of 16 bits are coded in float32.

    If a gradient of any rank is not finite, the mean is not, either, on all ranks, and the parts
    left out stay as before.  They are in units of the gradients: a loss scale (``GradScaler``) must
    not change.

    Attributes:
        steps: number of backward passes; random numbers depend on it.
    """

    def __init__(
        self,
        net: DistributedDataParallel,
        codec: str,
        *,
        start: int = 0,
        least: int = 1024,
        feedback: str = "auto",
        seed: int = 0,
    ) -> None:
        """Choose the codec; arguments as in the table ``[compress]`` of a job.

        Raises:
            TypeError: ``net`` is on a group of another backend.
            ValueError: there is no such codec, or it cannot be combined with the other arguments.
        """
        if codec == "none":
            raise CodecError("'none' is no codec; leave the hook out, or name one")
        try:
            table = converted(
                dict(codec=codec, start=start, least=least, feedback=feedback),
                Compress,
            )
            if isinstance(parsed := parse(codec), DGC) and parsed.clip:
                raise CodecError(
                    f"codec = {codec!r}: the clip is of the whole gradient, of which a hook has a "
                    "bucket; leave it out"
                )
            for _, why in codec_faults(table, parsed):
                raise CodecError(f"codec = {codec!r}: {why}")
        except ConfigError as error:
            raise CodecError(str(error)) from error
        backend = backend_of(net.process_group)
        if backend is None:
            raise TypeError(
                f"codecs need a group of the backend {NAME!r}, not "
                f'{dist.get_backend(net.process_group)!r}: init_process_group({NAME!r}, "mpi://")'
            )
        self._backend, self._comm = backend, backend.comm
        self._first = 2 if net.static_graph else 0 if net.find_unused_parameters else 1
        dice = Dice(seed, self._comm.rank)
        self._drops = net.find_unused_parameters and not net.static_graph
        self._summation = CompressedSummation(compression(table), dice, Dense(), tells=True)
        self._sums: dict[int, tuple[list[torch.Tensor], torch.Tensor, Sum]] = {}
        self._start = self._passes = 0
        self._loaded: dict[str, torch.Tensor] = {}
        self.steps = 0

    def begin(self, bucket: Any) -> torch.futures.Future[Any]:
        """Start to average a bucket; collective.

        Raises:
            RuntimeError: the module has other parameters than when the hook was registered, or
                loaded state belongs to other gradients.
        """
        if bucket.index() == 0:
            if self._sums and self._loaded:
                raise RuntimeError(
                    f"state of {', '.join(sorted(self._loaded)[:3])} was loaded, and no gradients "
                    "are coded so; load it into a Compression of the same codec, with the same "
                    "bucket_cap_mb"
                )
            self.steps += 1
            self._passes += 1
        work = self._backend.in_order("compressed sum", lambda: self._sum(bucket), bucket.buffer())
        return work.get_future()

    def _sum(self, bucket: Any) -> None:
        buffer, index = bucket.buffer(), bucket.index()
        buffer.div_(self._comm.size)
        is_narrow = buffer.dtype in NARROW  # widened to float32 to be coded
        if not (is_narrow or buffer.dtype in _CODED) or self._passes <= self._first:
            self._comm.Allreduce(MPI.IN_PLACE, as_array(buffer))
            return
        parameters = bucket.parameters()
        if index not in self._sums:
            own = buffer.float() if is_narrow else buffer
            self._sums[index] = parameters, own, self._bind(bucket, own)
            self._restore()
        first, own, found = self._sums[index]
        if list(map(id, first)) != list(map(id, parameters)):
            raise RuntimeError(
                "the module has other parameters or buckets than when its gradients were first "
                "coded; wrap it again, with another Compression"
            )
        self._summation.dice.step = self.steps - 1
        is_elsewhere = own.data_ptr() != buffer.data_ptr()  # as zeros of a rank in join() are
        if is_elsewhere:
            own.copy_(buffer)
        if isinstance(found, CodedSum):
            self._coded(found, own, list(map(torch.numel, parameters)))
        else:
            found.Start()
            found.Wait()
        if is_elsewhere:
            buffer.copy_(own)

    def _coded(self, found: CodedSum, own: torch.Tensor, sizes: list[int]) -> None:
        """Run a sum by codes in which tensors that are 0 on all ranks have no part.

        Where torch finds parameters that no rank has used, it drops their sum, and with it what
        their residuals would add to it.
        """
        unused: list[slice] = []
        if self._drops:
            used = np.array([bool(part.any()) for part in own.split(sizes)], np.uint8)
            self._comm.Allreduce(MPI.IN_PLACE, used, op=MPI.MAX)
            places = zip(slices(sizes), used, strict=True)
            unused = [part for part, is_used in places if not is_used]
        kept = list(found.kept()) if unused else []
        before = [one.values.copy() for one in kept]
        asides = [
            (number, part)
            for number, one in enumerate(kept)
            for part in (_within(one, found.start, where) for where in unused)
        ]
        for number, part in asides:
            kept[number].values[part] = 0
        found.Start()
        found.Wait()
        (found.commit if found.is_finite else found.rollback)()
        for number, part in asides:
            kept[number].values[part] = before[number][part]
        if found.is_finite:
            for where in unused:
                own[where] = 0

    def _bind(self, bucket: Any, buffer: torch.Tensor) -> Sum:
        """A sum of the values in ``buffer``, which are the bucket's."""
        if buffer.is_cuda:
            raise TypeError(
                f"the gradients lie on {buffer.device}, and codecs compute on the host; leave the "
                "hook out, or keep the module on the CPU"
            )
        own, start = as_array(buffer), self._start
        self._start += own.size
        gradients = bucket.gradients()
        parts = buffer.split([gradient.numel() for gradient in gradients])
        tensors = {
            f"bucket{bucket.index()}.{number}": as_array(part.as_strided(one.shape, one.stride()))
            for number, (part, one) in enumerate(zip(parts, gradients, strict=True))
        }
        where = Bucket(start, self._start, frozenset(), DATA)
        return self._summation.bind(Summand(where, self._comm, own, tensors, own))

    def _restore(self) -> None:
        """Write loaded values into the sums that keep them."""
        for name, values in self._kept().items():
            if name in self._loaded:
                saved = self._loaded.pop(name)
                if saved.shape != values.shape:
                    raise RuntimeError(
                        f"state of {name} has shape {tuple(saved.shape)}, and what is coded so "
                        f"{tuple(values.shape)}; take the same bucket_cap_mb"
                    )
                values.copy_(saved)

    def _kept(self) -> dict[str, torch.Tensor]:
        """Views of all values that are kept, by name."""
        found = {f"{kept.name}.{kept.start}": kept.values for kept in self._summation.kept()}
        return {name: as_tensor(v) for name, v in (found | dict(self._summation.state())).items()}

    def state_dict(self) -> dict[str, torch.Tensor]:
        """State of this rank, which every rank must save to go on bit by bit."""
        kept = {name: values.clone() for name, values in self._kept().items()}
        return {"steps": torch.tensor(self.steps), **self._loaded, **kept}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take over the state that this rank has saved, before the first backward pass.

        Raises:
            RuntimeError: a backward pass came before.
        """
        if self._sums:
            raise RuntimeError("gradients were coded already; load before the first backward()")
        self._loaded = dict(state)
        self.steps = int(self._loaded.pop("steps"))

    def close(self) -> None:
        """Free the sums; collective, before the group ends."""
        while self._sums:
            self._sums.popitem()[1][-1].Free()


def _within(kept: KeptElements, start: int, where: slice) -> slice:
    """The part of ``kept`` that lies in ``where`` of a bucket whose first element is ``start``."""
    ahead = kept.start - start
    return slice(max(0, where.start - ahead), max(0, where.stop - ahead))


def compression_hook(
    state: Compression, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:  # torch looks at these two types
    """Hook for ``register_comm_hook``: the mean of a bucket by a codec."""
    return state.begin(bucket)
