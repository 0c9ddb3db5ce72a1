"""A GPT-2 of transformers with random weights learns generated text, as it comes.

mpirun -n 2 python examples/transformer.py
mpirun -n 2 python examples/transformer.py '{"pipe": 2}'

It needs torch and transformers, and downloads nothing.
"""

import json
import sys

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel

import mpitrain


class Texts(Dataset):
    """Each number is the last one plus 5; texts are padded, and padding does not count (-100)."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        place, length = torch.arange(16), 8 + i % 9
        text, is_text = (i + 5 * place) % 64, place < length
        return {
            "input_ids": torch.where(is_text, text, 0),
            "attention_mask": is_text.long(),
            "labels": torch.where(is_text, text, -100),
        }


def model() -> GPT2LMHeadModel:
    """Made on all ranks with the same seed."""
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=64, n_positions=16, n_embd=32, n_layer=4, n_head=4,
            bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip


def main() -> None:
    trainer = mpitrain.Trainer(
        model=model,
        train_data=Texts(),
        loss="model",  # the one that it computes itself
        cuts="transformer.h",  # blocks between which a pipeline may cut it
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        batch_size=32,
        micro_batches=2,
        epochs=2,
        parallel=json.loads(sys.argv[1]) if len(sys.argv) > 1 else {},
        run={"dir": "runs/transformer", "log_every": 1},
    )
    with trainer:
        trainer.fit()
        if trainer.comm.rank == 0:
            trainer.module.config.save_pretrained("gpt2")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
