"""Stage 9: modules, losses and optimisers of torch in the GPU's memory, beside the CPU's."""

from itertools import islice

import numpy as np
import torch

import mpitrain
from mpitrain.adapters.torch.arrays import as_array, as_tensor
from mpitrain.training.evaluation import evaluate
from tests.gpu.check import Check
from tests.gpu.jobs import everybody, expect_near


class Samples:
    """Points and what is to be found of them."""

    def __init__(self, classes=0, count=48):
        self.x = np.random.default_rng(5).normal(size=(count, 12)).astype(np.float32)
        self.y = (self.x[:, :3] ** 2).astype(np.float32)
        if classes:
            self.y = np.argmax(self.x[:, :classes], axis=1)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


class Gated(torch.nn.Module):
    """A buffer and a frozen parameter, both of which stay on the host."""

    def __init__(self, width):
        super().__init__()
        self.register_buffer("shift", torch.linspace(-1, 1, width))
        self.gate = torch.nn.Parameter(torch.full((width,), 0.5), requires_grad=False)
        self.inner = torch.nn.Linear(width, width)

    def forward(self, x):
        return x + self.gate * torch.tanh(self.inner(x + self.shift))


def module(outputs=3):
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Linear(12, 16, bias=False),  # one's gradient would be rounding, behind a norm
        torch.nn.BatchNorm1d(16),
        Gated(16),
        torch.nn.Dropout(0.2),
        torch.nn.GELU(),
        torch.nn.Linear(16, outputs),
    )


def run(device, classes=0, steps=4, **given):
    """Losses and norms of steps, the test's numbers, and the module's values at the end."""
    data = Samples(classes)
    settings = {
        "model": lambda: module(classes or 3), "train_data": data, "test_data": data,
        "loss": torch.nn.functional.mse_loss, "metrics": {"mae": torch.nn.functional.l1_loss},
        "batch_size": 16, "epochs": 3, "seed": 4, "optim": {"name": "adam", "lr": 0.01},
    } | given  # fmt: skip
    with everybody() as comm, mpitrain.Trainer(comm, device=device, **settings) as trainer:
        assert trainer.parts.device.name.startswith(device)
        found = [(r.loss, r.grad_norm) for r in islice(trainer.run_epoch(0), steps)]
        tested = evaluate(trainer.parts, 0) if given.get("test_data", data) else None
        trainer.parts.check_replicas("at the end")
        values = {k: v.clone() for k, v in trainer.gather().state_dict().items()}
    return found, tested and (tested.test_loss, tested.metrics), values


def trainer(**given):
    def check():
        right, found = (run(device, **given) for device in ("cpu", "cuda"))
        expect_near(found[0], right[0], 1e-3)
        expect_near(found[1][0], right[1][0], 1e-3)
        for name, value in right[2].items():
            torch.testing.assert_close(found[2][name], value, rtol=1e-2, atol=1e-3)
        return f"4 steps; loss {found[0][-1][0]:.5f}, the CPU's {right[0][-1][0]:.5f}"

    return check


def one_memory():
    """Neither direction copies, and both say the same of it."""
    import cupy

    for kind in (np.float32, np.float64, np.int64, np.uint8):
        array = cupy.arange(12, dtype=kind).reshape(3, 4)
        tensor = as_tensor(array)
        tensor += 1
        back = as_array(tensor, cupy)
        assert tensor.data_ptr() == array.data.ptr == back.data.ptr
        assert (cupy.asnumpy(back) == np.arange(1, 13).reshape(3, 4)).all()
    return "four types, no copy"


CHECKS = [
    Check(9, "torch.one memory", one_memory),
    Check(9, "torch.data", trainer(micro_batches=2), (1, 2), 120.0),
    Check(9, "torch.zero 2", trainer(parallel={"zero": 2}, micro_batches=2), (2,), 120.0),
    Check(9, "torch.zero 3", trainer(parallel={"zero": 3}, micro_batches=2), (2,), 120.0),
    Check(9, "torch.recompute", trainer(parallel={"recompute": True}), (1,), 120.0),
    Check(9, "torch.pipe", trainer(parallel={"pipe": 2}, micro_batches=2), (2,), 120.0),
    Check(9, "torch.optimizer",
          trainer(optimizer=lambda p: torch.optim.AdamW(p, lr=0.01), optim={}), (1, 2), 120.0),
]  # fmt: skip
