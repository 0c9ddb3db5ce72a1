"""Tiny models of ``transformers`` train under the shadow as they come, without a false alarm."""

import logging
from itertools import product

import pytest
import torch
from mpi4py import MPI

import mpitrain
from tests.cases import mostly_slow

SIZES = {
    "vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 24, "max_position_embeddings": 16, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "num_labels": 3,
}  # fmt: skip
GROUPED = {"num_key_value_heads": 1, "head_dim": 8}
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_decoder_layers": 1,
      "num_heads": 2, "decoder_start_token_id": 0}  # fmt: skip
BART = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
        "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24,
        "decoder_start_token_id": 0}  # fmt: skip
EXPERTS = GROUPED | {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2,
                     "moe_intermediate_size": 8, "experts_implementation": "eager"}  # fmt: skip
IMAGE = {"image_size": 8, "patch_size": 4, "num_channels": 3}
STAGES = {"depths": [1, 1], "hidden_sizes": [8, 16], "embedding_size": 8, "num_stages": 2}
POOLS = {"depths": [1, 1], "hidden_sizes": [8, 16], "num_encoder_blocks": 2,
         "patch_sizes": [3, 3], "strides": [2, 2], "padding": [1, 1]}  # fmt: skip
HEADS = {"num_key_value_heads": 1}
#: Kinds of models, by their configurations, with the sizes that are not as for most.
KINDS = {
    "CausalLM": [
        ("gpt2 gpt_neox gpt_bigcode openai-gpt bloom falcon biogpt phi", {}),
        ("llama mistral qwen3 gemma gemma2 gemma3_text", GROUPED),
        ("qwen2 phi3 stablelm olmo2 cohere starcoder2 granite", HEADS),
        ("gptj codegen", {"rotary_dim": 4}),
        ("gpt_neo", {"attention_types": [[["global", "local"], 1]]}),
        ("opt", {"ffn_dim": 24, "word_embed_proj_dim": 16}),
        ("mixtral", EXPERTS),
        ("mamba", {"state_size": 4}),
    ],
    "MaskedLM": [
        ("bert distilbert deberta-v2 mpnet fnet modernbert", {}),
        ("electra albert", {"embedding_size": 8}),
        ("roberta", {"max_position_embeddings": 20}),
        ("roformer", {"embedding_size": 16}),
    ],
    "Seq2SeqLM": [("t5", T5), ("bart pegasus marian", BART)],
    "ImageClassification": [("vit", IMAGE), ("resnet convnext", STAGES), ("poolformer", POOLS)],
}
ALL = {
    name: (kind, sizes)
    for kind, rows in KINDS.items()
    for names, sizes in rows
    for name in names.split()
}


QUICK = ("llama", "float32"), ("bert", "float64")


def model(name):
    import transformers

    kind, sizes = ALL[name]
    config = transformers.AutoConfig.for_model(name, **SIZES | sizes)
    return getattr(transformers, f"AutoModelFor{kind}").from_config(config)


@pytest.mark.parametrize(
    ("name", "dtype"), mostly_slow(product(ALL, ("float32", "float64")), QUICK)
)
def test_a_model_takes_two_steps_as_in_plain_torch(tmp_path, caplog, name, dtype):
    pytest.importorskip("transformers", reason="transformers is not installed")
    from tests.mpi.mpitrain.test_transformers import Images, Texts

    data = Images if ALL[name][0] == "ImageClassification" else Texts
    caplog.set_level(logging.INFO, "mpitrain")
    with mpitrain.Trainer(
        MPI.COMM_SELF, model=lambda: model(name).to(getattr(torch, dtype)),
        train_data=data(12, seed=1), loss="model", dtype=dtype,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), dir=str(tmp_path),
        batch_size=4, steps=2, epochs=1, shadow=2,
    ) as trainer:  # fmt: skip
        trainer.fit()
    told = [r.getMessage() for r in caplog.records if "run.shadow" in r.getMessage()]
    assert len(told) == 1 and "2 steps are as in plain torch" in told[0], told
