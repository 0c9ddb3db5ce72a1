"""Broadcasts, gathers and exchanges of torch's tensors."""

import math
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI

from collectives.calls.native import COUNTABLE
from collectives.torch.calls import Calls, Tensors, blocks_of, listed, options_of
from collectives.torch.devices import tensors_of
from collectives.torch.tensors import (
    SMALL,
    Joined,
    apart,
    check_dense,
    check_parts,
    check_whole,
    memory,
    small,
    small_pair,
)


class Copies(Calls):
    """The operations that move the ranks' tensors."""

    def broadcast(
        self, tensors: Any, opts: Any = None, timeout: Any = None, *, root: Any = None
    ) -> dist._Work:
        if root is not None or type(opts) is not dist.BroadcastOptions:
            opts = options_of(opts, rootRank=root, timeout=timeout)
        root = opts.rootRank
        if (buffer := small(tensors)) is not None:
            bcast, given = self._library.Bcast, (self.comm, buffer, root)
            return self._submit("broadcast", tensors, opts, bcast, given, None, root)
        return self._broadcast(listed(tensors), opts, root)  # a closure here slows small calls

    def _broadcast(self, tensors: Tensors, opts: Any, root: int) -> dist._Work:
        check_dense(tensors)

        def call() -> None:
            for tensor in tensors:
                flat = Joined([tensor], reads=self._rank == root)
                self.comm.Bcast(memory(flat.whole), root)
                if self._rank != root:
                    flat.write_back()

        return self._submit("broadcast", tensors, opts, call, root=root)

    def allgather(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None
    ) -> dist._Work:
        """Tensors may have another size on each rank."""
        if isinstance(inputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        for parts, source in zip(outputs, inputs, strict=True):
            check_parts("all_gather", parts, source, self._size, self._rank)
        return self._all_gather("all_gather", outputs, inputs, opts)

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist._Work:
        if len(outputs) != self._size or any(len(parts) != len(inputs) for parts in outputs):
            raise ValueError("expected a list for each rank, with a tensor for each input")
        return self.allgather([list(parts) for parts in zip(*outputs)], inputs, opts)

    def all_gather_single(
        self, output: torch.Tensor, source: torch.Tensor, opts: Any = None
    ) -> dist._Work:
        if (pair := small_pair(source, output, (1, self._size))) is not None:
            what, call, given = "all_gather_single", self._library.Allgather, (self.comm, *pair)
            return self._submit(what, [output], opts, call, given, [source])
        return self.all_gather_single_coalesced([output], [source], opts)

    def all_gather_single_coalesced(
        self, outputs: Any, inputs: Any, opts: Any = None
    ) -> dist._Work:
        for output, source in zip(outputs, inputs, strict=True):
            check_whole("all_gather_single", output, source, self._size)
        return self._all_gather("all_gather_single", outputs, inputs, opts)

    def _all_gather(self, what: str, outputs: Any, inputs: Any, opts: Any) -> dist._Work:
        """Gathers each input into an output: a tensor, or one for each rank."""
        outputs, inputs = [listed(output) for output in outputs], list(inputs)  # copies of lists

        def call() -> None:
            for parts, source in zip(outputs, inputs):
                with Joined(parts, reads=False) as whole:
                    comm, way = self._node_memory.way(whole.nbytes)
                    counts = [part.numel() for part in parts]
                    if len(set(counts)) > 1:
                        comm.Allgatherv(memory(apart([source], whole)), [memory(whole), counts])
                    else:
                        sent = _sent(source, whole, self._rank)
                        comm.Allgather(sent, memory(whole), algorithm=way)

        return self._submit(what, [*tensors_of(outputs)], opts, call, inputs=inputs)

    def gather(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None, *, root: Any = None
    ) -> dist._Work:
        if root is not None or type(opts) is not dist.GatherOptions:
            opts = options_of(opts, rootRank=root, timeout=timeout)
        (source,), root = listed(inputs), opts.rootRank
        check_dense([source])
        parts = blocks_of(outputs) if self._rank == root else []
        if self._rank == root:
            check_parts("gather", parts, source, self._size)

        def call() -> None:
            if not parts:
                self.comm.Gather(memory(Joined([source], reads=True).whole), None, root)
                return
            with Joined(parts, reads=False) as whole:
                self.comm.Gather(memory(apart([source], whole)), memory(whole), root)

        return self._submit("gather", parts, opts, call, inputs=[source], root=root)

    def scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None, *, root: Any = None
    ) -> dist._Work:
        if root is not None or type(opts) is not dist.ScatterOptions:
            opts = options_of(opts, rootRank=root, timeout=timeout)
        (output,), root = listed(outputs), opts.rootRank
        check_dense([output])
        parts = blocks_of(inputs) if self._rank == root else []
        if self._rank == root:
            check_parts("scatter", parts, output, self._size)

        def call() -> None:
            with Joined([output], reads=False) as whole:
                sent = memory(apart(parts, whole)) if parts else None
                self.comm.Scatter(sent, memory(whole), root)

        return self._submit("scatter", [output], opts, call, inputs=parts, root=root)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        opts: Any = None,
        timeout: Any = None,
    ) -> dist._Work:
        """Always MPI's Alltoallv: ranks may leave out splits that others give."""
        what, size, shape = "all_to_all_single", self._size, source.shape
        is_even = not (input_split_sizes or output_split_sizes)
        has_blocks = is_even and shape == output.shape and shape and shape[0] % size == 0
        if has_blocks and (pair := small_pair(source, output, (size, size))) is not None:
            call, given = self._library.Alltoallv, (self.comm, *pair)
            return self._submit(what, [output], opts, call, given, [source])
        check_dense([output, source])
        sent = self._items("input", source, input_split_sizes)
        got = self._items("output", output, output_split_sizes)
        if sent[self._rank] != got[self._rank]:
            raise ValueError(
                f"the block of this rank for itself does not fit: {sent} items of an input "
                f"{tuple(source.shape)}, and {got} of an output {tuple(output.shape)}"
            )
        return self._all_to_all(what, [output], [source], sent, got, opts)

    def alltoall(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None
    ) -> dist._Work:
        """Every pair of ranks may exchange another number of items."""
        size, rank = self._size, self._rank
        if len(inputs) != size:
            raise ValueError(f"all_to_all takes {size} tensors, one a rank, got {len(inputs)}")
        check_parts("all_to_all", outputs, inputs[rank], size, rank)
        check_parts("all_to_all", inputs, outputs[rank], size, rank)
        sent, got = ([tensor.numel() for tensor in tensors] for tensors in (inputs, outputs))
        return self._all_to_all("all_to_all", outputs, inputs, sent, got, opts)

    def _all_to_all(
        self, what: str, outputs: Tensors, inputs: Tensors, sent: Any, got: Any, opts: Any
    ) -> dist._Work:
        """Exchanges blocks of so many sent and received items."""
        outputs, inputs = list(outputs), list(inputs)  # the caller may change its lists

        def call() -> None:
            with Joined(outputs, reads=False) as whole:
                own, other = _blocks(apart(inputs, whole), sent), _blocks(whole, got)
                self.comm.Alltoallv(own, other)
                for kind in (*own[2:], *other[2:]):
                    kind.Free()

        return self._submit(what, outputs, opts, call, inputs=inputs)

    def _items(self, which: str, tensor: torch.Tensor, splits: list[int]) -> list[int]:
        """Items of each rank's block of rows of a tensor."""
        if not tensor.dim():
            raise ValueError(f"all_to_all_single divides rows, and the {which} is one number")
        rows, size = len(tensor), self._size
        if not splits and rows % size:
            raise ValueError(
                f"Tensor's dim 0 does not divide equally across group size: {rows} rows of the "
                f"{which}, {size} ranks"
            )
        blocks = splits or [rows // size] * size
        if len(blocks) != size or sum(blocks) != rows:
            raise ValueError(
                f"expected {size} sizes of blocks that make {rows} rows of the {which} together, "
                f"got {blocks}"
            )
        return [block * tensor.numel() // max(1, rows) for block in blocks]

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    alltoall_base = all_to_all_single


def _sent(source: torch.Tensor, whole: torch.Tensor, rank: int) -> Any:
    """The block that a rank sends in an all-gather, whose input may lie in its output.

    MPI wants in place from all ranks or from none, so the size says which.  Up to ``SMALL``, other
    ranks may be in :func:`small_pair`'s call, which is not in place.
    """
    if whole.nbytes <= SMALL:
        return memory(apart([source], whole))
    sent = Joined([source], reads=True).whole
    own = whole[rank * len(sent) :][: len(sent)]
    if sent.data_ptr() != own.data_ptr():
        own.copy_(apart([sent], own))
    return MPI.IN_PLACE


def _blocks(flat: torch.Tensor, counts: list[int]) -> list[Any]:
    """Memory and blocks as Alltoallv takes them; large ones in greater units, as not every MPI
    library counts above 2^31."""
    unit = math.gcd(*counts) if len(flat) > COUNTABLE else 1
    if unit == 1:
        return [memory(flat), counts]
    kind = MPI.BYTE.Create_contiguous(unit * flat.itemsize).Commit()
    return [memory(flat), [count // unit for count in counts], kind]
