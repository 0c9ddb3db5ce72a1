"""Broadcasts, gathers and exchanges of torch's tensors."""

from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI

from collectives.torch.calls import Calls, Tensors, in_items, listed
from collectives.torch.tensors import Joined, apart, check_dense, dense, memory, small


class Copies(Calls):
    """The operations that move the ranks' tensors."""

    def broadcast(self, tensors: Any, options: Any = None, **named: Any) -> dist._Work:
        tensors = listed(tensors)
        root = named.get("root", getattr(options, "rootRank", options))
        if len(tensors) == 1 and (buffer := small(tensors[0])) is not None:
            bcast, given = self._small["Bcast"], (self.comm, buffer, root)
            return self._submit("broadcast", tensors, options, bcast, given, root=root)
        check_dense(tensors)

        def call() -> None:
            for tensor in tensors:
                with Joined([tensor], reads=self.comm.rank == root) as whole:
                    self.comm.Bcast(memory(whole), root)

        return self._submit("broadcast", tensors, options, call, root=root)

    def allgather(self, outputs: Any, inputs: Any, options: Any = None, **_: Any) -> dist._Work:
        """Tensors may have another size on each rank."""
        if isinstance(inputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        for parts, source in zip(outputs, inputs, strict=True):
            self._check_parts("all_gather", parts, source, self.comm.rank)

        def call() -> None:
            for parts, source in zip(outputs, inputs):
                with Joined(parts, reads=False) as whole:
                    sent, counts = memory(apart(source, whole)), _counts(parts, whole)
                    if len(set(counts)) == 1:
                        self.comm.Allgather(sent, memory(whole))
                    else:
                        self.comm.Allgatherv(sent, [memory(whole), counts])

        return self._submit("all_gather", outputs, options, call, inputs=inputs)

    def allgather_coalesced(
        self, outputs: Any, inputs: Any, options: Any = None, **_: Any
    ) -> dist._Work:
        if len(outputs) != self.comm.size or any(len(parts) != len(inputs) for parts in outputs):
            raise ValueError("expected a list for each rank, with a tensor for each input")
        return self.allgather([list(parts) for parts in zip(*outputs)], inputs, options)

    def all_gather_single(
        self, output: torch.Tensor, source: torch.Tensor, options: Any = None
    ) -> dist._Work:
        work = None
        if source.numel() * self.comm.size == output.numel():
            work = self._small_pair("all_gather_single", "Allgather", source, output, options)
        return work or self.all_gather_single_coalesced([output], [source], options)

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
                with Joined([output], reads=False) as whole:
                    sent = _own_block(dense(source), whole, self.comm.rank)
                    self._node_memory.comm(output.nbytes).Allgather(sent, memory(whole))

        return self._submit("all_gather_single", outputs, options, call, inputs=inputs)

    def gather(self, outputs: Any, inputs: Any, options: Any = None, **_: Any) -> dist._Work:
        (source,), root = listed(inputs), options.rootRank
        check_dense([source])
        parts = outputs[0] if self.comm.rank == root else []
        if parts:
            self._check_parts("gather", parts, source)

        def call() -> None:
            if not parts:
                self.comm.Gather(memory(dense(source)), None, root)
                return
            with Joined(parts, reads=False) as whole:
                self.comm.Gather(memory(apart(source, whole)), memory(whole), root)

        return self._submit("gather", parts, options, call, inputs=[source], root=root)

    def scatter(self, outputs: Any, inputs: Any, options: Any = None, **_: Any) -> dist._Work:
        (output,), root = listed(outputs), options.rootRank
        check_dense([output])
        parts = inputs[0] if self.comm.rank == root else []
        if parts:
            self._check_parts("scatter", parts, output)

        def call() -> None:
            with Joined([output], reads=False) as whole:
                sent = memory(apart(Joined(parts, reads=True).whole, whole)) if parts else None
                self.comm.Scatter(sent, memory(whole), root)

        return self._submit("scatter", [output], options, call, inputs=parts, root=root)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        output_splits: list[int],
        input_splits: list[int],
        options: Any = None,
        **_: Any,
    ) -> dist._Work:
        shape = source.shape
        is_even = not input_splits and not output_splits and shape == output.shape
        if is_even and shape and shape[0] % self.comm.size == 0:
            work = self._small_pair("all_to_all_single", "Alltoall", source, output, options)
            if work is not None:
                return work
        check_dense([output, source])
        splits = (source, input_splits), (output, output_splits)
        sent_counts, received_counts = (self._rows(*split) for split in splits)
        sent_items = in_items(sent_counts, source)
        received_items = in_items(received_counts, output)
        if sent_items[self.comm.rank] != received_items[self.comm.rank]:
            raise ValueError(
                f"the block of this rank for itself does not fit: rows {sent_counts} of an input "
                f"{tuple(source.shape)}, and {received_counts} of an output {tuple(output.shape)}"
            )

        def call() -> None:
            with Joined([output], reads=False) as whole:
                sent = memory(apart(source, whole))
                if output_splits or input_splits:
                    self.comm.Alltoallv([sent, sent_items], [memory(whole), received_items])
                else:
                    self.comm.Alltoall(sent, memory(whole))

        return self._submit("all_to_all_single", [output], options, call, inputs=[source])

    def alltoall(self, outputs: Any, inputs: Any, options: Any = None, **_: Any) -> dist._Work:
        """Every pair of ranks may exchange another number of items."""
        check_dense([*outputs, *inputs])
        for tensors in (outputs, inputs):
            if len(tensors) != self.comm.size or len({t.dtype for t in tensors}) > 1:
                raise ValueError(f"expected {self.comm.size} tensors of one dtype, one a rank")
        _check_items("all_to_all", inputs[self.comm.rank], [outputs[self.comm.rank]])

        def call() -> None:
            with Joined(outputs, reads=False) as whole:
                source = apart(Joined(inputs, reads=True).whole, whole)
                sent = [memory(source), _counts(inputs, source)]
                self.comm.Alltoallv(sent, [memory(whole), _counts(outputs, whole)])

        return self._submit("all_to_all", outputs, options, call, inputs=inputs)

    def _check_parts(
        self, what: str, parts: Tensors, one: torch.Tensor, of: int | None = None
    ) -> None:
        """Checks that a list has a tensor for each rank, and that they, or the one ``of`` a rank,
        have as many items as this rank's."""
        check_dense([*parts, one])
        if len(parts) != self.comm.size or {part.dtype for part in parts} != {one.dtype}:
            raise ValueError(
                f"{what} takes {self.comm.size} tensors of {one.dtype}, one a rank, got "
                f"{len(parts)} of {', '.join(sorted({str(part.dtype) for part in parts}))}"
            )
        _check_items(what, one, parts if of is None else [parts[of]])

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

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    alltoall_base = all_to_all_single


def _check_items(what: str, own: torch.Tensor, parts: Tensors) -> None:
    """Checks that these tensors have as many items as this rank's own one."""
    if {part.numel() for part in parts} != {own.numel()}:
        raise ValueError(
            f"{what} of {own.numel()} items of this rank does not fit tensors of "
            f"{[part.numel() for part in parts]} items"
        )


def _counts(parts: Tensors, whole: torch.Tensor) -> list[int]:
    """Items of each part, as its array counts them."""
    return [len(memory(whole)) * part.numel() // max(1, whole.numel()) for part in parts]


def _own_block(source: torch.Tensor, output: torch.Tensor, rank: int) -> Any:
    """The block that a rank sends in an all-gather whose input may lie in its output."""
    begin = output.data_ptr()
    if not begin <= source.data_ptr() < begin + output.nbytes:
        return memory(source)
    if source.data_ptr() == begin + rank * source.nbytes:
        return MPI.IN_PLACE
    return memory(source.clone())
