"""Sums and other reductions of torch's tensors."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI

from collectives.errors import MismatchError
from collectives.torch.calls import Calls, Tensors, blocks_of, listed, options_of
from collectives.torch.devices import devices_of, is_on_host
from collectives.torch.node_memory import is_called_by_reducer
from collectives.torch.reduce_op import PLAIN_OPS, Reduction, reduction
from collectives.torch.tensors import (
    SMALL,
    SUMMABLE,
    Joined,
    apart,
    check_dense,
    check_parts,
    check_whole,
    memory,
    small,
    small_pair,
)


class Reductions(Calls):
    """The operations that add, multiply or compare the ranks' tensors."""

    def allreduce(
        self, tensors: Any, opts: Any = None, timeout: Any = None, *, op: Any = None
    ) -> dist._Work:
        if op is not None or type(opts) is not dist.AllreduceOptions:
            opts = options_of(opts, reduceOp=op, timeout=timeout)
        op = PLAIN_OPS.get(hash(opts.reduceOp))
        if op is not None and (buffer := small(tensors, SUMMABLE)) is not None:
            given: Any = self.comm, MPI.IN_PLACE, buffer, op
            return self._submit("all_reduce", tensors, opts, self._library.Allreduce, given)
        tensors = listed(tensors)
        if torch.sparse_coo in [tensor.layout for tensor in tensors]:
            return self.allreduce_sparse(tensors, opts)
        return self._allreduce("all_reduce", tensors, opts)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> dist._Work:
        opts = options_of(opts, reduceOp=None)
        return self._allreduce("all_reduce_coalesced", listed(tensors), opts)

    def _allreduce(self, what: str, tensors: Tensors, opts: Any) -> dist._Work:
        """One sum over all tensors of a dtype."""
        check_dense(tensors)
        dtypes = {tensor.dtype: reduction(opts, tensor.dtype) for tensor in tensors}
        is_large = len(tensors) == 1 and is_on_host(tensors[0]) and tensors[0].nbytes > SMALL
        is_bucket = is_large and is_called_by_reducer()

        def call() -> None:
            for dtype, how in dtypes.items():
                with Joined([t for t in tensors if t.dtype == dtype], reads=True) as whole:
                    self._sum(whole, how, is_bucket)

        return self._submit(what, tensors, opts, call)

    def allreduce_sparse(self, tensors: Any, opts: Any = None) -> dist._Work:
        """Sums of sparse tensors in COO format; the ranks' indices may differ."""
        opts = options_of(opts, reduceOp=None)
        tensors = listed(tensors)
        how = [reduction(opts, tensor.dtype) for tensor in tensors]
        if any(one.op != MPI.SUM or one.factor is not None for one in how):
            raise ValueError("sparse tensors can be summed and averaged, and nothing else")
        made = partial(torch.sparse_coo_tensor, check_invariants=False)
        streams = {where: torch.accelerator.current_stream(where) for where in devices_of(tensors)}

        def call() -> None:
            for tensor, one in zip(tensors, how):
                own = tensor.detach()
                given = own._indices(), one.addend(own._values()), own.shape
                part = made(*given, is_coalesced=own.is_coalesced())
                total = self._sparse_sum(part.coalesce())
                result = torch.empty_like(total.values(), dtype=own.dtype)
                one.finish(total.values(), result, self._size)
                total = made(total.indices(), result, own.shape, is_coalesced=True)
                tensor.copy_(total.to(tensor.device))
                for part in (tensor._indices(), tensor._values()) if tensor.is_cuda else ():
                    part.record_stream(streams[tensor.device])  # it was made on the call's own

        return self._submit("sparse_all_reduce", tensors, opts, call)

    def reduce(
        self,
        tensors: Any,
        opts: Any = None,
        op: Any = None,
        timeout: Any = None,
        *,
        root: Any = None,
    ) -> dist._Work:
        if op is not None or root is not None or type(opts) is not dist.ReduceOptions:
            opts = options_of(opts, rootRank=root, reduceOp=op, timeout=timeout)
        root, op = opts.rootRank, PLAIN_OPS.get(hash(opts.reduceOp))
        if op is not None and (buffer := small(tensors, SUMMABLE)) is not None:
            sent, got = (MPI.IN_PLACE, buffer) if root == self._rank else (buffer, None)
            call, given = self._library.Reduce, (self.comm, sent, got, op, root)
            return self._submit("reduce", tensors, opts, call, given, None, root)
        return self._reduce(listed(tensors), opts, root)  # a closure here slows small calls

    def _reduce(self, tensors: Tensors, opts: Any, root: int) -> dist._Work:
        check_dense(tensors)
        how = [reduction(opts, tensor.dtype) for tensor in tensors]

        def call() -> None:
            for tensor, one in zip(tensors, how):
                flat = Joined([tensor], reads=True)
                part = one.addend(flat.whole)
                if root == self._rank:
                    self.comm.Reduce(MPI.IN_PLACE, memory(part), one.op, root)
                    one.finish(part, flat.whole, self._size)
                    flat.write_back()
                else:
                    self.comm.Reduce(memory(part), None, one.op, root)

        return self._submit("reduce", tensors, opts, call, root=root)

    def reduce_scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None, *, op: Any = None
    ) -> dist._Work:
        """Blocks may be unequal."""
        if op is not None or type(opts) is not dist.ReduceScatterOptions:
            opts = options_of(opts, reduceOp=op, timeout=timeout)
        output, parts = listed(outputs)[0], blocks_of(inputs)
        check_parts("reduce_scatter", parts, output, self._size, self._rank)
        return self._reduce_scatter("reduce_scatter", [output], [parts], opts)

    def reduce_scatter_single(
        self, output: torch.Tensor, source: torch.Tensor, opts: Any = None
    ) -> dist._Work:
        what = "reduce_scatter_single"
        if type(opts) is not dist.ReduceScatterOptions:
            opts = options_of(opts, reduceOp=None)
        op = PLAIN_OPS.get(hash(opts.reduceOp))
        if op is not None and (pair := small_pair(source, output, (self._size, 1), SUMMABLE)):
            given: Any = self.comm, *pair, op
            call = self._library.Reduce_scatter_block
            return self._submit(what, [output], opts, call, given, [source])
        return self.reduce_scatter_single_coalesced([output], [source], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Any, inputs: Any, opts: Any = None
    ) -> dist._Work:
        opts = options_of(opts, reduceOp=None)
        for output, source in zip(outputs, inputs, strict=True):
            check_whole("reduce_scatter_single", source, output, self._size)
        return self._reduce_scatter("reduce_scatter_single", outputs, inputs, opts)

    def _reduce_scatter(self, what: str, outputs: Any, inputs: Any, opts: Any) -> dist._Work:
        """Reduces each input, a tensor or one for each rank, and scatters it to an output."""
        outputs, inputs = list(outputs), list(inputs)  # the caller may change its lists
        how = [reduction(opts, output.dtype) for output in outputs]

        def call() -> None:
            for output, source, one in zip(outputs, inputs, how):
                with Joined([output], reads=False) as whole:
                    self._reduce_blocks(listed(source), whole, one)

        return self._submit(what, outputs, opts, call, inputs=inputs)

    def _reduce_blocks(self, parts: Tensors, whole: torch.Tensor, how: Reduction) -> None:
        source = apart(parts, whole)  # an output may be a block of its input
        counts = [part.numel() for part in parts]
        if len(set(counts)) > 1:
            total = torch.empty(len(whole), dtype=how.wide or whole.dtype)
            self.comm.Reduce_scatter(memory(how.addend(source)), memory(total), counts, how.op)
            how.finish(total, whole, self._size)
            return
        for addends, total, result in self._pieces(source, whole, how):
            comm, way = self._node_memory.way(addends.nbytes)
            comm.Reduce_scatter_block(memory(addends), memory(total), how.op, algorithm=way)
            how.finish(total, result, self._size)

    def _pieces(
        self, source: torch.Tensor, whole: torch.Tensor, how: Reduction
    ) -> Iterator[tuple[torch.Tensor, ...]]:
        """The addends of each call, memory for its result, and the place of that: all at once, or
        piece by piece where they are widened, in memory that is kept."""
        node = self._node_memory
        if how.wide is None:
            yield how.addend(source), whole, whole
            return
        room = node.room(len(source) + len(whole), how.wide)
        items = len(room) // (self._size + 1)
        for block, result in zip(source.view(self._size, -1).split(items, 1), whole.split(items)):
            wide, part = room[: block.numel() + len(result)].split([block.numel(), len(result)])
            yield how.addend(block, wide.view(block.shape)), part, result

    def _sum(self, flat: torch.Tensor, how: Reduction, is_bucket: bool = False) -> None:
        node = self._node_memory
        if how.wide is None and flat.nbytes > SMALL:
            node.meet(flat, is_bucket and how.factor is None, self._roots)
        room = flat if how.wide is None else node.room(len(flat), how.wide)
        for result in flat.split(max(1, len(room))):
            part = how.addend(result, room[: len(result)])
            comm, way = node.way(part.nbytes)
            comm.Allreduce(MPI.IN_PLACE, memory(part), how.op, algorithm=way)
            how.finish(part, result, self._size)

    def _sparse_sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks of a coalesced sparse tensor, by an all-gather of what is there.

        Raises:
            MismatchError: on all ranks: their tensors are not alike, so that indices of one would
                lie outside of another.
        """
        form = f"{tuple(tensor.shape)} of {tensor.dtype}, {tensor.sparse_dim()} of it sparse"
        counts, forms = zip(*self.comm.allgather((tensor._nnz(), form)))
        for rank, other in enumerate(forms):
            if other != forms[0]:
                raise MismatchError(
                    f"the ranks' sparse tensors differ: rank 0 sums {forms[0]}, rank {rank} {other}"
                )
        indices = self._gathered(tensor.indices().t(), counts)
        values = self._gathered(tensor.values(), counts)
        shape = tensor.shape
        total = torch.sparse_coo_tensor(indices.t(), values, shape, check_invariants=False)
        return total.coalesce()

    def _gathered(self, rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """All ranks' rows, one behind the other."""
        gathered = torch.empty((sum(counts), *rows.shape[1:]), dtype=rows.dtype)
        items = [count * rows.shape[1:].numel() for count in counts]
        self.comm.Allgatherv(memory(apart([rows], gathered)), [memory(gathered), items])
        return gathered

    # torch up to 2.12 calls some operations by other names, and newer ones may still.

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
