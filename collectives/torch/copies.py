"""Broadcasts, gathers and exchanges of torch's tensors."""

from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI

from collectives.torch.calls import Calls, listed
from collectives.torch.tensors import (
    Joined,
    apart,
    check_dense,
    check_parts,
    check_whole,
    dense,
    memory,
    small,
)


class Copies(Calls):
    """The operations that move the ranks' tensors."""

    def broadcast(self, tensors: Any, options: Any = None, **named: Any) -> dist._Work:
        tensors = listed(tensors)
        root = named.get("root", getattr(options, "rootRank", options))
        if (buffer := small(tensors)) is not None:
            bcast, given = self._small["Bcast"], (self.comm, buffer, root)
            return self._submit("broadcast", tensors, options, bcast, given, root=root)
        check_dense(tensors)

        def call() -> None:
            for tensor in tensors:
                with Joined([tensor], reads=self._rank == root) as whole:
                    self.comm.Bcast(memory(whole), root)

        return self._submit("broadcast", tensors, options, call, root=root)

    def allgather(self, outputs: Any, inputs: Any, options: Any = None, **_: Any) -> dist._Work:
        """Tensors may have another size on each rank."""
        if isinstance(inputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        for parts, source in zip(outputs, inputs, strict=True):
            check_parts("all_gather", parts, source, self._size, self._rank)

        def call() -> None:
            for parts, source in zip(outputs, inputs):
                with Joined(parts, reads=False) as whole:
                    sent, counts = memory(apart(source, whole)), [part.numel() for part in parts]
                    if len(set(counts)) == 1:
                        self.comm.Allgather(sent, memory(whole))
                    else:
                        self.comm.Allgatherv(sent, [memory(whole), counts])

        return self._submit("all_gather", outputs, options, call, inputs=inputs)

    def allgather_coalesced(
        self, outputs: Any, inputs: Any, options: Any = None, **_: Any
    ) -> dist._Work:
        if len(outputs) != self._size or any(len(parts) != len(inputs) for parts in outputs):
            raise ValueError("expected a list for each rank, with a tensor for each input")
        return self.allgather([list(parts) for parts in zip(*outputs)], inputs, options)

    def all_gather_single(
        self, output: torch.Tensor, source: torch.Tensor, options: Any = None
    ) -> dist._Work:
        how = "all_gather_single", "Allgather", source, output, options
        work = self._submit_pair(*how, (1, self._size))
        return work or self.all_gather_single_coalesced([output], [source], options)

    def all_gather_single_coalesced(
        self, outputs: Any, inputs: Any, options: Any = None
    ) -> dist._Work:
        for output, source in zip(outputs, inputs, strict=True):
            check_whole("all_gather_single", output, source, self._size)

        def call() -> None:
            for output, source in zip(outputs, inputs):
                with Joined([output], reads=False) as whole:
                    sent = _own_block(dense(source), whole, self._rank)
                    self._node_memory.comm(output.nbytes).Allgather(sent, memory(whole))

        return self._submit("all_gather_single", outputs, options, call, inputs=inputs)

    def gather(self, outputs: Any, inputs: Any, options: Any = None, **_: Any) -> dist._Work:
        (source,), root = listed(inputs), options.rootRank
        check_dense([source])
        parts = outputs[0] if self._rank == root else []
        if parts:
            check_parts("gather", parts, source, self._size)

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
        parts = inputs[0] if self._rank == root else []
        if parts:
            check_parts("scatter", parts, output, self._size)

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
        shape, size = source.shape, self._size
        is_even = not (input_splits or output_splits) and shape == output.shape
        if is_even and shape and shape[0] % size == 0:
            how = "all_to_all_single", "Alltoall", source, output, options
            if (work := self._submit_pair(*how, (size, size))) is not None:
                return work
        check_dense([output, source])
        sent_items = self._items("input", source, input_splits)
        received_items = self._items("output", output, output_splits)
        if sent_items[self._rank] != received_items[self._rank]:
            raise ValueError(
                f"the block of this rank for itself does not fit: {sent_items} items of an input "
                f"{tuple(source.shape)}, and {received_items} of an output {tuple(output.shape)}"
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
        size, rank = self._size, self._rank
        counts = [[tensor.numel() for tensor in tensors] for tensors in (inputs, outputs)]
        if len(inputs) != size:
            raise ValueError(f"all_to_all takes {size} tensors, one a rank, got {len(inputs)}")
        check_parts("all_to_all", outputs, inputs[rank], size, rank)
        check_parts("all_to_all", inputs, outputs[rank], size, rank)

        def call() -> None:
            with Joined(outputs, reads=False) as whole:
                source = apart(Joined(inputs, reads=True).whole, whole)
                self.comm.Alltoallv([memory(source), counts[0]], [memory(whole), counts[1]])

        return self._submit("all_to_all", outputs, options, call, inputs=inputs)

    def _items(self, which: str, tensor: torch.Tensor, splits: list[int]) -> list[int]:
        """Items of each rank's block of rows of a tensor."""
        rows, size = tensor.size(0) if tensor.dim() else 0, self._size
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


def _own_block(source: torch.Tensor, output: torch.Tensor, rank: int) -> Any:
    """The block that a rank sends in an all-gather whose input may lie in its output."""
    begin = output.data_ptr()
    if not begin <= source.data_ptr() < begin + output.nbytes:
        return memory(source)
    if source.data_ptr() == begin + rank * source.nbytes:
        return MPI.IN_PLACE
    return memory(source.clone())
