"""One's own torch model and data in the trainer, with samples that take their time to read.

    mpirun -n 2 python examples/own_data.py 0     # each step waits for its samples
    mpirun -n 2 python examples/own_data.py 2     # two processes of each rank read ahead

Prints the share of a step's time that was spent in reading, and ends with the same loss for any
number of ranks and of processes: what is random in a sample follows from the seed, the epoch and
the sample's number.
"""

import sys
import time

import torch
from torch.nn import BatchNorm1d, Dropout, Linear, ReLU, Sequential

import mpitrain


class Waves(torch.utils.data.Dataset):
    """Noisy points of a surface; each takes as long as a small file on a shared disc."""

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(0.002)
        x = torch.linspace(-2, 2, 4) * (index % 32) / 16
        return x, torch.sin(x).sum(0, keepdim=True) + 0.05 * torch.randn(1)


def model() -> Sequential:
    return Sequential(
        Linear(4, 256), BatchNorm1d(256), ReLU(), Dropout(0.1),
        Linear(256, 256), ReLU(), Linear(256, 1),
    )  # fmt: skip


def main() -> None:
    trainer = mpitrain.Trainer(
        model=model,
        train_data=Waves(),
        test_data=Waves(),
        loss=torch.nn.functional.mse_loss,
        metrics={"mae": lambda prediction, y: (prediction - y).abs().mean()},
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        batch_size=64,
        epochs=3,
        workers=int(sys.argv[1]) if sys.argv[1:] else 0,
        dir="runs/own_data",
    )
    history = trainer.fit()
    if trainer.comm.rank == 0:
        print(f"final loss {history[-1].test_loss:.4f}")


if __name__ == "__main__":
    main()
