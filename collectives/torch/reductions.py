"""Sums and other reductions of torch's tensors."""

from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI

from collectives.torch.calls import Calls, Tensors, listed
from collectives.torch.devices import is_on_host
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
    dense,
    memory,
    small,
)


class Reductions(Calls):
    """The operations that add, multiply or compare the ranks' tensors."""

    def allreduce(self, tensors: Any, options: Any = None, **_: Any) -> dist._Work:
        tensors, op = listed(tensors), _plain_op(options)
        if op is not None and (buffer := small(tensors, SUMMABLE)) is not None:
            given: Any = self.comm, MPI.IN_PLACE, buffer, op
            return self._submit("all_reduce", tensors, options, self._small["Allreduce"], given)
        if torch.sparse_coo in [tensor.layout for tensor in tensors]:
            return self.allreduce_sparse(tensors, options)
        return self._allreduce("all_reduce", tensors, options)

    def allreduce_coalesced(self, tensors: Any, options: Any = None, **_: Any) -> dist._Work:
        return self._allreduce("all_reduce_coalesced", listed(tensors), options)

    def _allreduce(self, what: str, tensors: Tensors, options: Any) -> dist._Work:
        """One sum over all tensors of a dtype."""
        check_dense(tensors)
        op = _op(options)
        dtypes = {tensor.dtype: reduction(op, tensor.dtype) for tensor in tensors}
        is_large = len(tensors) == 1 and is_on_host(tensors[0]) and tensors[0].nbytes > SMALL
        is_bucket = is_large and is_called_by_reducer()

        def call() -> None:
            for dtype, how in dtypes.items():
                with Joined([t for t in tensors if t.dtype == dtype], reads=True) as whole:
                    self._sum(whole, how, is_bucket)

        return self._submit(what, tensors, options, call)

    def allreduce_sparse(self, tensors: Any, options: Any = None) -> dist._Work:
        """Sums of sparse tensors in COO format; the ranks' indices may differ."""
        tensors = listed(tensors)
        how = [reduction(_op(options), tensor.dtype) for tensor in tensors]
        if any(one.op != MPI.SUM or one.factor is not None for one in how):
            raise ValueError("sparse tensors can be summed and averaged, and nothing else")
        if self.comm.is_reproducible:
            raise ValueError(
                "sparse tensors are summed rank by rank, which a reproducible group excludes; make "
                "them dense, or sum them in a group with GroupOptions(reproducible=False)"
            )

        def call() -> None:
            for tensor, one in zip(tensors, how):
                total = self._sparse_sum(tensor.detach().to(one.wide or tensor.dtype).coalesce())
                if one.mean:
                    one.divide(total.values(), self._size, total.values())
                tensor.copy_(total.to(tensor.device))

        return self._submit("sparse_all_reduce", tensors, options, call)

    def reduce(self, tensors: Any, options: Any = None, **_: Any) -> dist._Work:
        tensors, root, op = listed(tensors), options.rootRank, _plain_op(options)
        is_root = root == self._rank
        if op is not None and (buffer := small(tensors, SUMMABLE)) is not None:
            given: Any = self.comm, *_of_reduce(buffer, is_root), op, root
            return self._submit("reduce", tensors, options, self._small["Reduce"], given, root=root)
        check_dense(tensors)
        how = [reduction(_op(options), tensor.dtype) for tensor in tensors]

        def call() -> None:
            for tensor, one in zip(tensors, how):
                with Joined([tensor], reads=True) as whole:
                    part = _widened(whole, one)
                    self.comm.Reduce(*_of_reduce(memory(part), is_root), one.op, root)
                    if is_root:
                        self._finish(whole, part, one)

        return self._submit("reduce", tensors, options, call, root=root)

    def reduce_scatter(
        self, outputs: Any, inputs: Any, options: Any = None, **_: Any
    ) -> dist._Work:
        """Blocks may be unequal."""
        output = listed(outputs)[0]
        parts = inputs[0] if isinstance(inputs[0], list | tuple) else inputs
        check_parts("reduce_scatter", parts, output, self._size, self._rank)
        how, counts = reduction(_op(options), output.dtype), [part.numel() for part in parts]

        def call() -> None:
            self._reduce_scatter(output, Joined(parts, reads=True).whole, how, counts)

        return self._submit("reduce_scatter", [output], options, call, inputs=parts)

    def reduce_scatter_single(
        self, output: torch.Tensor, source: torch.Tensor, options: Any = None
    ) -> dist._Work:
        op, work = _plain_op(options), None
        if op is not None:
            how = "reduce_scatter_single", "Reduce_scatter_block", source, output, options
            work = self._submit_pair(*how, (self._size, 1), op)
        return work or self.reduce_scatter_single_coalesced([output], [source], options)

    def reduce_scatter_single_coalesced(
        self, outputs: Any, inputs: Any, options: Any = None
    ) -> dist._Work:
        how = [reduction(_op(options), output.dtype) for output in outputs]
        for output, source in zip(outputs, inputs, strict=True):
            check_whole("reduce_scatter_single", source, output, self._size)

        def call() -> None:
            for output, source, one in zip(outputs, inputs, how):
                self._reduce_scatter(output, source, one, None)

        return self._submit("reduce_scatter_single", outputs, options, call, inputs=inputs)

    def _reduce_scatter(
        self, output: torch.Tensor, source: torch.Tensor, how: Reduction, counts: list[int] | None
    ) -> None:
        with Joined([output], reads=False) as target:
            whole = target.view(-1)
            source = apart(source, whole)  # an output may be a block of its input
            if counts is not None and len(set(counts)) > 1:
                part = torch.empty(whole.numel(), dtype=how.wide or whole.dtype)
                wide = memory(_widened(source, how))
                self.comm.Reduce_scatter(wide, memory(part), counts, how.op)
                self._finish(whole, part, how)
            elif how.wide is None:
                self._reduce_scatter_blocks(whole, source, how)
            else:
                self._reduce_scatter_widened(whole, source, how, how.wide)

    def _reduce_scatter_blocks(
        self, whole: torch.Tensor, source: torch.Tensor, how: Reduction
    ) -> None:
        node, part = self._node_memory, whole
        comm = node.comm(source.nbytes)
        if comm is not self.comm:  # where the results lie in shared memory, too, it is faster
            part = node.shared(whole)
        comm.Reduce_scatter_block(memory(_widened(source, how)), memory(part), how.op)
        self._finish(whole, part, how)

    def _reduce_scatter_widened(
        self, whole: torch.Tensor, source: torch.Tensor, how: Reduction, dtype: torch.dtype
    ) -> None:
        """Piece by piece, in memory that is kept."""
        node, rows = self._node_memory, source.view(self._size, -1)
        room = node.room(source.numel() + whole.numel(), dtype)
        items = room.numel() // (self._size + 1)
        for block, result in zip(rows.split(items, 1), whole.split(items)):
            end = block.numel() + result.numel()
            wide, part = room[: block.numel()], room[block.numel() : end]
            wide.view(block.shape).copy_(block)
            comm = node.comm(wide.nbytes)
            comm.Reduce_scatter_block(_multiplied(wide, how), memory(part), how.op)
            self._finish(result, part, how)

    def _sum(self, flat: torch.Tensor, how: Reduction, is_bucket: bool = False) -> None:
        node = self._node_memory
        if how.wide is not None:
            room = node.room(flat.numel(), how.wide)
            for result in flat.view(-1).split(room.numel()):
                wide = room[: result.numel()].copy_(result)
                comm = node.comm(wide.nbytes)
                comm.Allreduce(MPI.IN_PLACE, _multiplied(wide, how), how.op)
                self._finish(result, wide, how)
            return
        part = _widened(flat, how)
        if flat.nbytes > SMALL:
            node.meet(flat, is_bucket and part is flat, self._roots)
        node.comm(flat.nbytes).Allreduce(MPI.IN_PLACE, memory(part), how.op)
        self._finish(flat, part, how)

    def _finish(self, result: torch.Tensor, part: torch.Tensor, how: Reduction) -> None:
        """Makes the mean of a sum, and brings it to the result's memory and dtype."""
        result = result.detach()  # it may be of inference mode
        part = part.view(result.shape)
        if how.mean and part.dtype == result.dtype:
            how.divide(part, self._size, result)
            return
        if how.mean:
            how.divide(part, self._size, part)
        if part.data_ptr() != result.data_ptr():
            result.copy_(part)

    def _sparse_sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks of a coalesced sparse tensor, by an all-gather of what is there."""
        counts = self.comm.allgather(tensor._nnz())
        indices = self._gathered(tensor.indices().t().contiguous(), counts)
        values = self._gathered(tensor.values(), counts)
        return torch.sparse_coo_tensor(indices.t(), values, tensor.shape).coalesce()

    def _gathered(self, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """All ranks' rows, one behind the other."""
        rows = dense(rows)
        gathered = torch.empty((sum(counts), *rows.shape[1:]), dtype=rows.dtype)
        items = [count * rows.shape[1:].numel() for count in counts]
        self.comm.Allgatherv(memory(rows), [memory(gathered), items])
        return gathered

    # torch up to 2.12 calls some operations by other names, and newer ones may still.

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced


def _of_reduce(buffer: Any, is_root: bool) -> tuple[Any, Any]:
    """The buffers of a reduce whose result takes the place of the root's own part."""
    return (MPI.IN_PLACE, buffer) if is_root else (buffer, None)


def _op(options: Any) -> Any:
    if options is None:
        return dist.ReduceOp.SUM
    return getattr(options, "reduceOp", options)


def _plain_op(options: Any) -> MPI.Op | None:
    """MPI's operation if it needs nothing beside it."""
    return PLAIN_OPS.get(hash(getattr(options, "reduceOp", options)))


def _widened(flat: torch.Tensor, how: Reduction) -> torch.Tensor:
    """The part that a rank adds: the tensor, or a copy that is wider or multiplied."""
    part = flat if how.wide is None else flat.to(how.wide)
    return part if how.factor is None else (part * how.factor).to(part.dtype)


def _multiplied(wide: torch.Tensor, how: Reduction) -> Any:
    return memory(wide if how.factor is None else wide.mul_(how.factor))
