"""Hugging Face's Trainer on a GPT-2 of random weights and generated text, data parallel.

mpirun -n 4 python -m collectives.torch examples/pytorch/huggingface.py
torchrun --standalone --nproc-per-node 4 examples/pytorch/huggingface.py --backend gloo

It needs transformers and accelerate, and downloads nothing.
"""

import argparse
import sys
import tempfile

import torch
import torch.distributed as dist

try:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
except ImportError:
    sys.exit("this example needs transformers and accelerate: pip install transformers accelerate")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="mpi")
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    first = torch.randint(64, (128, 1))
    text = (first + 5 * torch.arange(16)) % 64  # each number is the last one plus 5
    data = [{"input_ids": row, "labels": row} for row in text]
    width = {"n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 4}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, **width, **dropout, **ends))
    with tempfile.TemporaryDirectory() as folder:
        how = TrainingArguments(
            folder,
            use_cpu=True,
            ddp_backend=given.backend,
            per_device_train_batch_size=4,
            max_steps=5,
            learning_rate=1e-2,
            logging_steps=1,
            save_strategy="no",
            disable_tqdm=True,
            report_to=[],
        )
        trainer = Trainer(model, how, train_dataset=data)
        trainer.train()
    if dist.get_rank() == 0:
        for line in trainer.state.log_history:
            if "loss" in line:
                print(f"step {line['step']}: loss {float(line['loss']):.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
