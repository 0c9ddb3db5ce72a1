"""Cost of ``run.shadow``: time and memory of a run's first steps with it and without.

python -m benchmarks.shadow_cost

docs/measurements.md has, for each model without and with it, the seconds of the steps and the MiB;
then the forward passes before step 1 of the MLP and the GPTs without it, with it, and in all.
"""

import argparse
import resource
import subprocess
import sys
import tempfile
from time import perf_counter
from typing import Any

STEPS = 8
#: Width, blocks and samples a batch of each model, with its parameters; no blocks: an MLP.
MODELS = {"MLP, 2 k": (32, 0, 32), "GPT, 0.2 M": (64, 4, 8), "GPT, 100 M": (768, 14, 4)}


def _model(width: int, blocks: int) -> Any:
    """A perceptron, or a Transformer over texts, which counts its forward passes."""
    from torch import nn

    class Net(nn.Module):
        calls = 0

        def __init__(self) -> None:
            super().__init__()
            self.enter = nn.Embedding(256, width) if blocks else nn.Linear(32, width)
            self.leave = nn.Linear(width, 16)
            self.blocks = nn.ModuleList(
                nn.TransformerEncoderLayer(
                    width, width // 32, 4 * width, 0.0, batch_first=True, norm_first=True
                )
                for _ in range(blocks)
            )

        def forward(self, x: Any) -> Any:
            Net.calls += 1
            y = self.enter(x).tanh()
            if blocks:
                mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
                for block in self.blocks:
                    y = block(y, mask, is_causal=True)
                y = y.mean(1)
            return self.leave(y)

    return Net()


def report(name: str, shadow: int) -> None:
    """Print seconds of the first steps, MiB at most, and forward passes."""
    import torch
    from mpi4py import MPI

    import mpitrain

    torch.set_num_threads(1)
    width, blocks, batch = MODELS[name]
    samples, draw = STEPS * batch, torch.Generator().manual_seed(1)
    x = torch.randn(samples, 32, generator=draw)
    if blocks:
        x = torch.randint(256, (samples, 64), generator=draw)
    data = torch.utils.data.TensorDataset(x, torch.randint(16, (samples,), generator=draw))
    module = _model(width, blocks)
    calls = list[int]()
    with tempfile.TemporaryDirectory() as folder:
        begun = perf_counter()
        with mpitrain.Trainer(
            MPI.COMM_SELF, model=module, train_data=data, loss=torch.nn.CrossEntropyLoss(),
            optimizer=lambda p: torch.optim.AdamW(p, lr=1e-4), batch_size=batch, epochs=1,
            dir=folder, shadow=shadow, log_every=100,
        ) as trainer:  # fmt: skip
            made = perf_counter()
            for _ in trainer.run_epoch(0):
                calls.append(type(module).calls)
            ended = perf_counter()
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(f"| {name} | {shadow} | {made - begun:.2f} | {ended - made:.2f} | {most} | "
          f"{calls[0] - 1} | {calls[-1]} |", flush=True)  # fmt: skip


def main() -> int:
    """Runs each case in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--one", nargs=2, metavar=("MODEL", "SHADOW"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        report(options.one[0], int(options.one[1]))
        return 0
    print("| model | run.shadow | making it, s | 8 steps, s | memory, MiB | "
          "forward passes before step 1 | in all |", flush=True)  # fmt: skip
    print("| --- |" + " ---: |" * 6, flush=True)
    for name in options.models:
        for shadow in ("0", "8"):
            words = [sys.executable, "-m", "benchmarks.shadow_cost", "--one", name, shadow]
            subprocess.run(words, check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
