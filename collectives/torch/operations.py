"""torch's operations on tensors, carried out by the collectives of a communicator."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI

from collectives.communicator import Communicator
from collectives.failure.watchdog import Watchdog
from collectives.torch.messages import MessageWork
from collectives.torch.order import JointWork, Order
from collectives.torch.reduction import Reduction, reduction
from collectives.torch.tensors import Joined, check_dense, dense, memory

Tensors = Sequence[torch.Tensor]


class Operations:
    """The operations of ``torch.distributed`` over one communicator.

    A method does what torch's documentation says of the function that calls it.  Calls with
    ``async_op=True`` run in the group's thread, or in a caller that waits; the others at once.

    Attributes:
        comm: the communicator.
    """

    comm: Communicator
    _watchdog: Watchdog
    _order: Order
    _under_way: set[MessageWork]
    _calls: int
    #: Works of a coalescing block; ``None`` outside of one.
    _block: list[dist._Work] | None = None

    def _start_coalescing(self, device: Any = None) -> None:
        self._block = []

    def _end_coalescing(self, device: Any = None) -> dist._Work:
        """One work for all that the block has begun."""
        works, self._block = self._block or [], None
        return JointWork(works)

    start_coalescing, end_coalescing = _start_coalescing, _end_coalescing

    def _submit(self, what: str, call: Callable[[], None], value: Any, options: Any) -> dist._Work:
        """Runs a call, now or in the background, and has it watched under a name."""
        self._calls += 1

        def watched() -> None:
            with self._watchdog.waiting(what, numbered=True):
                call()

        run = self._order.later if getattr(options, "asyncOp", False) else self._order.now
        return self._begun(run(watched, value))

    def _begun(self, work: dist._Work) -> dist._Work:
        if self._block is not None:
            self._block.append(work)
        return work

    # --- sums and other reductions ----------------------------------------------------------------

    def allreduce(self, tensors: Any, options: Any = None, **_: Any) -> dist._Work:
        tensors = _listed(tensors)
        if any(tensor.layout is torch.sparse_coo for tensor in tensors):
            return self.allreduce_sparse(tensors, options)
        check_dense(tensors)
        op = _op(options)
        how = [reduction(op, tensor.dtype) for tensor in tensors]

        def call() -> None:
            for tensor, one in zip(tensors, how):
                flat = Joined([tensor], reads=True)
                self._sum(flat.whole, one)
                flat.write_back()

        return self._submit("allreduce", call, tensors, options)

    def allreduce_coalesced(self, tensors: Any, options: Any = None, **_: Any) -> dist._Work:
        """One sum over all tensors of a dtype."""
        tensors = _listed(tensors)
        check_dense(tensors)
        op = _op(options)
        dtypes = {tensor.dtype: reduction(op, tensor.dtype) for tensor in tensors}

        def call() -> None:
            for dtype, how in dtypes.items():
                flat = Joined([t for t in tensors if t.dtype == dtype], reads=True)
                self._sum(flat.whole, how)
                flat.write_back()

        return self._submit("allreduce_coalesced", call, tensors, options)

    def allreduce_sparse(self, tensors: Any, options: Any = None) -> dist._Work:
        """Sums of sparse tensors in COO format; the ranks' indices may differ."""
        tensors = _listed(tensors)
        how = [reduction(_op(options), tensor.dtype) for tensor in tensors]
        if any(one.op != MPI.SUM or one.factor is not None for one in how):
            raise ValueError("sparse tensors can be summed and averaged, and nothing else")

        def call() -> None:
            for tensor, one in zip(tensors, how):
                total = self._sparse_sum(tensor.detach().coalesce())
                one.divide(values := total.values(), self.comm.size)
                indices = total.indices()
                tensor.copy_(torch.sparse_coo_tensor(indices, values, tensor.shape))

        return self._submit("allreduce_sparse", call, tensors, options)

    def reduce(self, tensors: Any, options: Any = None, **_: Any) -> dist._Work:
        tensors = _listed(tensors)
        check_dense(tensors)
        root, op = options.rootRank, _op(options)
        how = [reduction(op, tensor.dtype) for tensor in tensors]

        def call() -> None:
            is_root = self.comm.rank == root
            for tensor, one in zip(tensors, how):
                flat = Joined([tensor], reads=True)
                part = _widened(flat.whole, one)
                if part is flat.whole and not is_root:
                    self.comm.Reduce(memory(part), None, one.op, root)
                    continue
                sent = MPI.IN_PLACE if is_root else memory(part)
                self.comm.Reduce(sent, memory(part) if is_root else None, one.op, root)
                if is_root:
                    self._finish(flat.whole, part, one)
                    flat.write_back()

        return self._submit("reduce", call, tensors, options)

    def reduce_scatter(
        self, outputs: Any, inputs: Any, options: Any = None, **_: Any
    ) -> dist._Work:
        """Blocks may be unequal."""
        output = _listed(outputs)[0]
        parts = inputs[0] if isinstance(inputs[0], list | tuple) else inputs
        self._check_reduced(parts, output, [part.numel() for part in parts][self.comm.rank])
        op = _op(options)

        def call() -> None:
            counts = [part.numel() for part in parts]
            flat = Joined(parts, reads=True).whole
            self._reduce_scatter(output, flat, reduction(op, output.dtype), counts)

        return self._submit("reduce_scatter", call, [output], options)

    def reduce_scatter_single(
        self, output: torch.Tensor, source: torch.Tensor, options: Any = None
    ) -> dist._Work:
        return self.reduce_scatter_single_coalesced([output], [source], options)

    def reduce_scatter_single_coalesced(
        self, outputs: Any, inputs: Any, options: Any = None
    ) -> dist._Work:
        op = _op(options)
        for output, source in zip(outputs, inputs, strict=True):
            if source.numel() != output.numel() * self.comm.size:
                raise ValueError(
                    "input tensor must be the same size as output tensor times world size, got "
                    f"{source.numel()} and {output.numel()} items on {self.comm.size} ranks"
                )
            self._check_reduced([source], output, output.numel())
            reduction(op, output.dtype)

        def call() -> None:
            for output, source in zip(outputs, inputs):
                self._reduce_scatter(output, dense(source), reduction(op, output.dtype), None)

        return self._submit("reduce_scatter_single", call, outputs, options)

    def _check_reduced(self, parts: Tensors, output: torch.Tensor, items: int) -> None:
        check_dense([*parts, output])
        if output.numel() != items or any(part.dtype != output.dtype for part in parts):
            raise ValueError(
                f"expected an output of {items} items of {parts[0].dtype}, as the inputs have, "
                f"got {output.numel()} of {output.dtype}"
            )

    def _reduce_scatter(
        self, output: torch.Tensor, source: torch.Tensor, how: Reduction, counts: list[int] | None
    ) -> None:
        target = Joined([output], reads=False)
        sent = _widened(source, how)
        part = target.whole
        if how.wide is not None:
            part = torch.empty(output.numel(), dtype=how.wide)
        if counts is None or len(set(counts)) == 1:
            self.comm.Reduce_scatter_block(memory(sent), memory(part), how.op)
        else:
            self.comm.Reduce_scatter(memory(sent), memory(part), counts, how.op)
        self._finish(target.whole, part, how)
        target.write_back()

    def _sum(self, flat: torch.Tensor, how: Reduction) -> None:
        part = _widened(flat, how)
        self.comm.Allreduce(MPI.IN_PLACE, memory(part), how.op)
        self._finish(flat, part, how)

    def _finish(self, result: torch.Tensor, part: torch.Tensor, how: Reduction) -> None:
        """Makes the mean of a sum, and brings it to the result's memory and dtype."""
        if how.mean:
            how.divide(part, self.comm.size)
        if part is not result and part.data_ptr() != result.data_ptr():
            result.copy_(part.view(result.shape))

    # --- copies -----------------------------------------------------------------------------------

    def broadcast(self, tensors: Any, options: Any = None, **named: Any) -> dist._Work:
        tensors = _listed(tensors)
        check_dense(tensors)
        root = named.get("root", getattr(options, "rootRank", options))

        def call() -> None:
            for tensor in tensors:
                flat = Joined([tensor], reads=self.comm.rank == root)
                self.comm.Bcast(memory(flat.whole), root)
                flat.write_back()

        return self._submit("broadcast", call, tensors, options)

    def allgather(self, outputs: Any, inputs: Any, options: Any = None, **_: Any) -> dist._Work:
        """Tensors may have another size on each rank."""
        if isinstance(inputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        for parts, source in zip(outputs, inputs, strict=True):
            self._check_parts(parts, source, "all_gather")

        def call() -> None:
            for parts, source in zip(outputs, inputs):
                flat = Joined(parts, reads=False)
                sent, received = memory(dense(source)), memory(flat.whole)
                counts = _counts(parts, flat.whole)
                if len(set(counts)) == 1:
                    self.comm.Allgather(sent, received)
                else:
                    self.comm.Allgatherv(sent, [received, counts])
                flat.write_back()

        return self._submit("allgather", call, outputs, options)

    def allgather_coalesced(
        self, outputs: Any, inputs: Any, options: Any = None, **_: Any
    ) -> dist._Work:
        if len(outputs) != self.comm.size or any(len(parts) != len(inputs) for parts in outputs):
            raise ValueError("expected a list for each rank, with a tensor for each input")
        return self.allgather([list(parts) for parts in zip(*outputs)], inputs, options)

    def all_gather_single(
        self, output: torch.Tensor, source: torch.Tensor, options: Any = None
    ) -> dist._Work:
        return self.all_gather_single_coalesced([output], [source], options)

    def all_gather_single_coalesced(
        self, outputs: Any, inputs: Any, options: Any = None
    ) -> dist._Work:
        for output, source in zip(outputs, inputs, strict=True):
            check_dense([output, source])
            if source.numel() * self.comm.size != output.numel() or output.dtype != source.dtype:
                raise ValueError(
                    "output tensor size must be equal to world_size times input tensor size, got "
                    f"{output.numel()} items of {output.dtype} and {source.numel()} of "
                    f"{source.dtype} on {self.comm.size} ranks"
                )

        def call() -> None:
            for output, source in zip(outputs, inputs):
                flat = Joined([output], reads=False)
                sent = _own_block(dense(source), flat.whole, self.comm.rank)
                self.comm.Allgather(sent, memory(flat.whole))
                flat.write_back()

        return self._submit("all_gather_single", call, outputs, options)

    def gather(self, outputs: Any, inputs: Any, options: Any = None, **_: Any) -> dist._Work:
        (source,), root = _listed(inputs), options.rootRank
        check_dense([source])
        parts = outputs[0] if self.comm.rank == root else []
        if parts:
            self._check_parts(parts, source, "gather")

        def call() -> None:
            flat = Joined(parts, reads=False) if parts else None
            received = memory(flat.whole) if flat else None
            self.comm.Gather(memory(dense(source)), received, root)
            if flat:
                flat.write_back()

        return self._submit("gather", call, parts, options)

    def scatter(self, outputs: Any, inputs: Any, options: Any = None, **_: Any) -> dist._Work:
        (output,), root = _listed(outputs), options.rootRank
        check_dense([output])
        parts = inputs[0] if self.comm.rank == root else []
        if parts:
            self._check_parts(parts, output, "scatter")

        def call() -> None:
            flat = Joined([output], reads=False)
            source = Joined(parts, reads=True).whole if parts else None
            self.comm.Scatter(None if source is None else memory(source), memory(flat.whole), root)
            flat.write_back()

        return self._submit("scatter", call, [output], options)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        output_splits: list[int],
        input_splits: list[int],
        options: Any = None,
        **_: Any,
    ) -> dist._Work:
        check_dense([output, source])
        splits = (source, input_splits), (output, output_splits)
        sent_counts, received_counts = (self._rows(*split) for split in splits)

        def call() -> None:
            flat = Joined([output], reads=False)
            sent, received = memory(dense(source)), memory(flat.whole)
            if output_splits or input_splits:
                self.comm.Alltoallv(
                    [sent, _in_items(sent_counts, source)],
                    [received, _in_items(received_counts, output)],
                )
            else:
                self.comm.Alltoall(sent, received)
            flat.write_back()

        return self._submit("all_to_all_single", call, [output], options)

    def alltoall(self, outputs: Any, inputs: Any, options: Any = None, **_: Any) -> dist._Work:
        """Every pair of ranks may exchange another number of items."""
        check_dense([*outputs, *inputs])
        for tensors in (outputs, inputs):
            if len(tensors) != self.comm.size or len({t.dtype for t in tensors}) > 1:
                raise ValueError(f"expected {self.comm.size} tensors of one dtype, one a rank")

        def call() -> None:
            flat, source = Joined(outputs, reads=False), Joined(inputs, reads=True)
            self.comm.Alltoallv(
                [memory(source.whole), _counts(inputs, source.whole)],
                [memory(flat.whole), _counts(outputs, flat.whole)],
            )
            flat.write_back()

        return self._submit("alltoall", call, outputs, options)

    def _check_parts(self, parts: Tensors, one: torch.Tensor, what: str) -> None:
        check_dense([*parts, one])
        if len(parts) != self.comm.size or any(part.dtype != one.dtype for part in parts):
            raise ValueError(
                f"{what} takes {self.comm.size} tensors of {one.dtype}, one a rank, got "
                f"{len(parts)} of {', '.join(sorted({str(part.dtype) for part in parts}))}"
            )

    def _rows(self, tensor: torch.Tensor, splits: list[int]) -> list[int]:
        """Rows of each rank's block of a tensor."""
        rows = tensor.size(0) if tensor.dim() else 0
        if not splits:
            if rows % self.comm.size:
                raise ValueError(
                    f"Tensor's dim 0 does not divide equally across group size: {rows} rows, "
                    f"{self.comm.size} ranks"
                )
            return [rows // self.comm.size] * self.comm.size
        if len(splits) != self.comm.size or sum(splits) != rows:
            raise ValueError(
                f"expected {self.comm.size} sizes of blocks that make {rows} rows together, "
                f"got {splits}"
            )
        return list(splits)

    # --- waiting, and messages --------------------------------------------------------------------

    def barrier(self, options: Any = None, **_: Any) -> dist._Work:
        return self._submit("barrier", self.comm.Barrier, [], options)

    def send(self, tensors: Tensors, to: int, tag: int = 0) -> dist._Work:
        check_dense(tensors)
        flat = Joined([dense(tensors[0])], reads=True)
        return self._message(self.comm.Isend(memory(flat.whole), to, tag), flat, False)

    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> dist._Work:
        check_dense(tensors)
        flat = Joined(tensors[:1], reads=False)
        return self._message(self.comm.Irecv(memory(flat.whole), source, tag), flat, True)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> dist._Work:
        return self.recv(tensors, MPI.ANY_SOURCE, tag)

    def _message(self, request: MPI.Request, flat: Joined, receives: bool) -> dist._Work:
        for earlier in list(self._under_way):  # lets go of those that nobody waits for
            earlier.is_completed()
        return self._begun(MessageWork(request, flat, receives, self._under_way, self._watchdog))

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
        self.comm.Allgatherv(memory(rows), [memory(gathered), _in_items(counts, gathered)])
        return gathered


# torch up to 2.12 calls some operations by other names, and newer ones may still.
for _new, _old in {
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
}.items():
    setattr(Operations, _old, getattr(Operations, _new))


def _listed(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _op(options: Any) -> Any:
    if options is None:
        return dist.ReduceOp.SUM
    return getattr(options, "reduceOp", options)


def _widened(flat: torch.Tensor, how: Reduction) -> torch.Tensor:
    """The part that a rank adds: the tensor, or a copy that is wider or multiplied."""
    part = flat if how.wide is None else flat.to(how.wide)
    return part if how.factor is None else part * how.factor


def _counts(parts: Tensors, whole: torch.Tensor) -> list[int]:
    """Items of each part, as its array counts them."""
    return [len(memory(whole)) * part.numel() // max(1, whole.numel()) for part in parts]


def _in_items(rows: list[int], tensor: torch.Tensor) -> list[int]:
    """Items of so many rows, as the tensor's array counts them."""
    total = tensor.size(0) if tensor.dim() else 0
    row = len(memory(tensor)) // total if total else 0
    return [count * row for count in rows]


def _own_block(source: torch.Tensor, output: torch.Tensor, rank: int) -> Any:
    """The block that a rank sends in an all-gather whose input may lie in its output."""
    begin = output.data_ptr()
    if not begin <= source.data_ptr() < begin + output.nbytes:
        return memory(source)
    if source.data_ptr() == begin + rank * source.nbytes:
        return MPI.IN_PLACE
    return memory(source.clone())
