"""A GPT's training step beside PyTorch's DistributedDataParallel over Gloo, in the same processes.

    mpirun -n 2 python -m benchmarks.ddp             # with --load 2: beside two busy processes

Rows with the same model, batch, type and threads: DDP over Gloo; a torch module with our
communication, overlapped and at the end; our own layers.  Steps of the rows take turns, so that
what else the machine does falls on all of them; times are medians of the slowest rank.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np
import torch
import torch.distributed
from mpi4py import MPI
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]
from torch import nn

from collectives import Communicator
from collectives.calls.native import release
from mpitrain.adapters.torch import DataParallel
from mpitrain.adapters.torch.buckets import GradientBucket
from mpitrain.adapters.torch.comm_hooks import UnderWay
from mpitrain.arrays import Gradients
from mpitrain.group import TensorGroup
from mpitrain.models import gpt
from mpitrain.models.model import SequentialModel
from mpitrain.objective.cross_entropy import CrossEntropy
from mpitrain.optim.optimizers import Adam
from mpitrain.parallel.arena import DATA, Arena
from mpitrain.parallel.data_parallel import Replicated
from mpitrain.parallel.store import Reduction
from mpitrain.parallel.summation import Dense
from mpitrain.pipeline.stage import Stage


class Block(nn.Module):
    """Attention and perceptron with pre-norm, as :mod:`mpitrain.models.gpt` has them."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, t, d = x.shape
        q, k, v = (
            part.view(n, t, self.heads, d // self.heads).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).split(d, dim=2)
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(n, t, d))
        h = nn.functional.gelu(self.up(self.norm2(x)), approximate="tanh")
        return x + self.down(h)


class TorchGPT(nn.Module):
    """The model in torch."""

    def __init__(self, vocabulary: int, context: int, width: int, blocks: int, heads: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(blocks)))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        return self.norm(self.blocks(h)) @ self.tokens.weight.T


class Ours:
    """The model in our layers."""

    def __init__(self, comm: Communicator, model: SequentialModel, reduction: Reduction) -> None:
        names = list(model.layers)
        initial = model.initial(names, 0, np, np.float32)
        shapes = {n: {k: v.shape for k, v in ps.items()} for n, ps in initial.items()}
        arena = Arena(model.layers, shapes)
        flat = np.empty(arena.size, np.float32)
        for index, name in enumerate(names):
            arena.fill(flat, index, initial[name])
        self.model = model
        self.store = Replicated(arena, flat, reduction, comm.empty)
        self.stage = Stage(list(model.layers.values()))
        self.optimizer = Adam(decoupled=True)
        self.state = [
            {slot: np.zeros_like(p.parameters) for slot in self.optimizer.slots}
            for p in self.store.pieces
        ]
        self.size = comm.size
        self.steps = 0
        self.waited = 0.0

    def step(self, x: np.ndarray, labels: np.ndarray) -> float:
        self.steps += 1
        self.store.reset()
        scores, saved = self.stage.forward(self.store, x)
        loss, dy = self.model.loss(scores, labels, labels.size * self.size)

        def emit(layer: int, gradients: Gradients) -> None:
            self.store.accumulate(layer, gradients)
            self.store.ready(layer)
            self.store.progress()

        self.stage.backward(self.store, saved, dy, emit)
        self.waited = self.store.wait()
        for piece, state in zip(self.store.pieces, self.state):
            direction = self.optimizer.prepare(piece.parameters, piece.gradients, state, self.steps)
            self.optimizer.apply(piece.parameters, direction, state, 1e-3)
        return loss


def main() -> int:
    """Run the comparison; rank 0 prints."""
    options = _parse()
    comm = Communicator(MPI.COMM_WORLD)
    threads = options.threads or max(1, len(os.sched_getaffinity(0)) // comm.ranks_per_node)
    with threadpool_limits(threads, user_api="blas"):
        torch.set_num_threads(threads)
        _join_gloo(comm, options.address)
        with _loaded(options.load if comm.rank == 0 else 0):
            rows = _measure(comm, options)
        if comm.rank == 0:
            _report(comm, options, rows)
        torch.distributed.destroy_process_group()
    return 0


@contextmanager
def _loaded(processes: int) -> Iterator[None]:
    """Context in which other processes compute on the ranks' cores."""
    command = [sys.executable, "-S", "-c", "while True: pass"]
    started = [subprocess.Popen(command) for _ in range(processes)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def _measure(comm: Communicator, options: argparse.Namespace) -> dict[str, list[float]]:
    shape = (options.vocabulary, options.context, options.width, options.blocks, options.heads)
    torch.manual_seed(0)
    gloo = nn.parallel.DistributedDataParallel(TorchGPT(*shape))
    torch.manual_seed(0)
    ours = DataParallel(
        comm, TorchGPT(*shape), bucket_bytes=options.bucket_bytes, algorithm=options.algorithm
    )
    torch.manual_seed(0)
    late = DataParallel(comm, TorchGPT(*shape), overlap=False, algorithm=options.algorithm)
    own = list(TorchGPT(*shape).parameters())
    alone = GradientBucket(comm, own, options.algorithm, UnderWay(comm))
    layers = gpt.layers(*shape, TensorGroup())
    native = Ours(
        comm,
        SequentialModel(layers, CrossEntropy(TensorGroup(), options.vocabulary), TensorGroup()),
        Reduction({DATA: comm}, Dense(options.algorithm), options.bucket_bytes),
    )
    optimizers = [torch.optim.AdamW(m.parameters(), 1e-3, fused=True) for m in (gloo, ours, late)]
    rng = np.random.default_rng(comm.rank)

    def with_gloo(x: np.ndarray, labels: np.ndarray) -> float:
        loss = _loss(gloo(torch.from_numpy(x)), labels)
        loss.backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
        return loss.item()

    def with_ours(
        x: np.ndarray, labels: np.ndarray, replica: DataParallel = ours, which: int = 1
    ) -> float:
        loss = _loss(replica(torch.from_numpy(x)), labels)
        loss.backward()
        optimizers[which].step()
        optimizers[which].zero_grad()
        return loss.item()

    def at_the_end(x: np.ndarray, labels: np.ndarray) -> float:
        return with_ours(x, labels, late, 2)

    def reduction_alone(x: np.ndarray, labels: np.ndarray) -> float:
        alone.start()
        alone.finish()
        return 0.0

    steps: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {
        "torch, DDP over Gloo": with_gloo,
        "torch, our communication": with_ours,
        "the same, at the end": at_the_end,
        "its reduction alone": reduction_alone,
        "our layers": native.step,
    }
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    losses: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(options.warmup + options.steps):
        x = rng.integers(0, options.vocabulary, (options.batch, options.context + 1))
        for name, step in steps.items():
            comm.Barrier()
            start = perf_counter()
            losses[name].append(step(x[:, :-1], x[:, 1:]))
            slowest = comm.allreduce(perf_counter() - start, MPI.MAX)
            if turn >= options.warmup:
                seconds[name].append(slowest)
    one, two = losses["torch, DDP over Gloo"], losses["torch, our communication"]
    if not np.allclose(one, two, rtol=1e-3):
        raise RuntimeError(f"the two torch rows do not train the same: {one[-3:]}, {two[-3:]}")
    ours.close()
    late.close()
    alone.free()
    native.store.close()
    return seconds


def _loss(scores: torch.Tensor, labels: np.ndarray) -> torch.Tensor:
    flat = scores.view(-1, scores.shape[-1])
    return nn.functional.cross_entropy(flat, torch.from_numpy(labels).reshape(-1))


def _join_gloo(comm: Communicator, address: str) -> None:
    port = None
    if comm.rank == 0:
        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
    host, port = comm.bcast((address or socket.gethostname(), port))
    torch.distributed.init_process_group(
        "gloo", f"tcp://{host}:{port}", rank=comm.rank, world_size=comm.size
    )


def _report(comm: Communicator, options: argparse.Namespace, rows: dict[str, list[float]]) -> None:
    count = sum(
        p.numel()
        for p in TorchGPT(
            options.vocabulary, options.context, options.width, options.blocks, options.heads
        ).parameters()
    )
    print(
        f"GPT of {options.blocks} blocks, width {options.width}, {count} parameters; "
        f"{comm.size} ranks, batch {options.batch} x {options.context} a rank, float32; "
        f"PyTorch {torch.__version__}, {release()}, {options.load} busy processes beside"
    )
    first = median(next(iter(rows.values())))
    print(f"{'':<26} {'ms/step':>8} {'x DDP':>6}")
    for name, seconds in rows.items():
        print(f"{name:<26} {1e3 * median(seconds):8.1f} {first / median(seconds):6.2f}")
    overlapped, late, alone = (
        median(rows[name])
        for name in ("torch, our communication", "the same, at the end", "its reduction alone")
    )
    print(f"hidden by overlap: {(late - overlapped) / alone:.0%} of {1e3 * alone:.1f} ms")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"options": vars(options) | {"json": ""}, "rows": rows}))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.ddp", description=__doc__)
    add = parser.add_argument
    add("--vocabulary", type=int, default=256)
    add("--context", type=int, default=64)
    add("--width", type=int, default=256)
    add("--blocks", type=int, default=4)
    add("--heads", type=int, default=4)
    add("--batch", type=int, default=8, help="samples a rank")
    add("--steps", type=int, default=30)
    add("--warmup", type=int, default=5)
    add("--threads", type=int, default=0, help="a rank; its share of the cores")
    add("--load", type=int, default=0, help="busy processes beside the ranks")
    add("--address", default="", help="address of rank 0, if it has no name")
    add("--algorithm", default="auto", help="our all-reduce")
    add("--bucket-bytes", type=int, default=2**20)
    add("-J", "--json", type=Path, help="write all times there")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
