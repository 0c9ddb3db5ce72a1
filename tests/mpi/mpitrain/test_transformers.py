"""Models of ``transformers`` as they come, and what is like them, train as one process does."""

from functools import cache
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import transformers
from mpi4py import MPI

import mpitrain
from mpitrain.checkpoint.export import export
from tests.cases import mostly_slow
from tests.mpi.mpitrain.fits import RANKS, loop, torch

VOCABULARY, LENGTH = 61, 12


def momentum(parameters):
    """Adam would make rounding of small gradients large."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


class Wide(torch.overrides.TorchFunctionMode):
    """Models compute in float64 where they ask for float32, as in norms and losses."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        def wide(value):
            return torch.float64 if value is torch.float32 else value

        if function is torch.Tensor.float:
            function = torch.Tensor.double
        kwargs = {name: wide(value) for name, value in (kwargs or {}).items()}
        return function(*map(wide, args), **kwargs)


class Texts(torch.utils.data.Dataset):
    """Dictionaries as a tokenizer gives them, with padding, and labels of -100."""

    def __init__(self, samples, seed, labels="words"):
        draw = torch.Generator().manual_seed(seed)
        self.words = torch.randint(1, VOCABULARY, (samples, LENGTH), generator=draw)
        lengths = torch.randint(3, LENGTH + 1, (samples, 1), generator=draw)
        self.mask = torch.arange(LENGTH) < lengths
        self.words *= self.mask
        self.counts = self.mask & (torch.rand(samples, LENGTH, generator=draw) < 0.6)
        self.labels = labels

    def __len__(self):
        return len(self.words)

    def __getitem__(self, i):
        labels = torch.where(self.counts[i], self.words[i], -100)
        if self.labels == "class":
            labels = self.words[i].sum() % 3
        return {"input_ids": self.words[i], "attention_mask": self.mask[i].long(), "labels": labels}


def padded(samples):
    """A batch as long as its longest text."""
    length = max(int(one["attention_mask"].sum()) for one in samples)
    short = [{n: v[:length] if v.dim() else v for n, v in one.items()} for one in samples]
    return torch.utils.data.default_collate(short)


class Images(Texts):
    def __getitem__(self, i):
        image = torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(int(i)))
        return {"pixel_values": image, "labels": self.words[i, 0] % 3}


SIZES = {
    "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 24,
}  # fmt: skip
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_decoder_layers": 2,
      "num_heads": 2, "decoder_start_token_id": 0}  # fmt: skip
DROPOUT = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
BERT = SIZES | DROPOUT | {"max_position_embeddings": 16}
GROUPED = SIZES | {"num_key_value_heads": 2}
#: grouped_mm has no float64.
EXPERTS = GROUPED | {"num_experts_per_tok": 2, "experts_implementation": "eager"}


def of(name, kind="CausalLM", **sizes):
    """Makes models of ``transformers`` for a task."""

    def make():
        config = transformers.AutoConfig.for_model(name, vocab_size=VOCABULARY, **sizes)
        return getattr(transformers, f"AutoModelFor{kind}").from_config(config)

    return make


gpt2 = of("gpt2", n_positions=16, n_embd=16, n_layer=3, n_head=2, bos_token_id=0, eos_token_id=0)
#: Two heads share each key and value.
llama = of("llama", attention_dropout=0.1, **GROUPED | {"num_attention_heads": 4})


def peft_gpt2():
    """LoRA by peft, which wraps the matrices that ranks share."""
    import peft

    options = {"r": 2, "target_modules": ["c_attn", "c_proj"], "lora_dropout": 0.1}
    config = peft.LoraConfig(**options, fan_in_fan_out=True, init_lora_weights=False)
    return peft.get_peft_model(gpt2(), config)


def without_dropout(make):
    model = make()
    for part in model.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
        if hasattr(part, "attention_dropout"):
            part.attention_dropout = 0.0
    return model


#: Function that makes a model, its data, and the list of its blocks.
MODELS = {
    "gpt2": (gpt2, Texts, "transformer.h"),
    "llama": (llama, Texts, "model.layers"),
    "bert mlm": (of("bert", "MaskedLM", **BERT), Texts, "bert.encoder.layer"),
    "bert class": (
        of("bert", "SequenceClassification", num_labels=3, **BERT),
        lambda samples, seed: Texts(samples, seed, "class"),
        "bert.encoder.layer",
    ),
    "vit": (
        of("vit", "ImageClassification", image_size=8, patch_size=4, num_labels=3, **SIZES,
           **DROPOUT), Images, "vit.layers",
    ),
    # With biases of queries, keys and values, and a window of attention in the last layers.
    "qwen2": (
        of("qwen2", use_sliding_window=True, sliding_window=4, max_window_layers=1,
           attention_dropout=0.1, **GROUPED), Texts, "model.layers",
    ),
}  # fmt: skip
MIXTURES = {
    "mixtral": (of("mixtral", num_local_experts=5, **EXPERTS), Texts, "model.layers"),
    # With a shared expert beside the stacks.
    "qwen2 moe": (
        of("qwen2_moe", num_experts=5, moe_intermediate_size=8, shared_expert_intermediate_size=8,
           **EXPERTS), Texts, "model.layers",
    ),
    # A dictionary of experts, with drops, in an encoder and a decoder.
    "switch": (
        of("switch_transformers", "Seq2SeqLM", num_sparse_encoder_layers=1, num_experts=4,
           num_sparse_decoder_layers=1, expert_capacity=3, dropout_rate=0.0,
           router_jitter_noise=0.0, **T5), Texts, (),
    ),
}  # fmt: skip
OTHERS = {
    "t5": (of("t5", "Seq2SeqLM", **T5), Texts, ()),  # its two halves share an embedding
    "peft gpt2": (peft_gpt2, Texts, "base_model.model.transformer.h"),
}
ALL = MODELS | MIXTURES | OTHERS
LAYOUTS = {
    "data": {},
    "zero 1": {"zero": 1},
    "zero 2": {"zero": 2},
    "zero 3": {"zero": 3, "recompute": True},
    **({"pipe 2": {"pipe": 2}, "tensor 2": {"tensor": 2}} if RANKS % 2 == 0 else {}),
    **({"pipe 2 x tensor 2": {"pipe": 2, "tensor": 2}} if RANKS % 4 == 0 else {}),
}


def alone(trainer, make):
    """Losses of one process with torch alone, on the same batches in one piece."""
    torch.manual_seed(7)
    data, sampler = trainer.parts.data.train, trainer.parts.sampler
    collate = data.collate or torch.utils.data.default_collate
    every = [batch for epoch in range(2) for batch in sampler.batches(epoch)]
    batches = [collate([data.data[i] for i in batch]) for batch in every]

    def loss(model, some):
        wide = {n: v.double() if v.is_floating_point() else v for n, v in some.items()}
        return model(**wide).loss

    return loop(make().double().train(), momentum, batches, loss)


def made(folder, make, data, **given):
    given = {"dir": str(folder / "run"), "shadow": 0, **given}
    return mpitrain.Trainer(
        model=lambda: make().double(), train_data=data(24, 1), loss="model", optimizer=momentum,
        batch_size=8, epochs=2, seed=7, **given,
    )  # fmt: skip


def every_loss(trainer):
    """Losses of two epochs."""
    return [record.loss for epoch in range(2) for record in trainer.run_epoch(epoch)]


def losses(folder, name, layout, **given):
    """Losses of a model in a layout."""
    make, data, blocks = ALL[name]
    parallel = LAYOUTS[layout] if isinstance(layout, str) else layout
    given |= {"parallel": parallel, "micro_batches": 2}
    if "pipe" in parallel:
        given["cuts"] = blocks
    if data is not Images:
        given["collate_fn"] = padded
    with Wide(), made(folder, make, data, **given) as trainer:
        return every_loss(trainer)


@cache
def in_one_process(name):
    """Losses of a model with the batches in one piece."""
    make, data, _ = ALL[name]
    own = TemporaryDirectory()
    with own, Wide(), made(Path(own.name), make, data, comm=MPI.COMM_SELF) as trainer:
        return every_loss(trainer)


#: Each model in each layout, and others in some.
CASES = [*product(MODELS, LAYOUTS), ("t5", "zero 1"), ("t5", "zero 3")]
CASES += product(["peft gpt2"], LAYOUTS)
CASES += set(product(MIXTURES, ("data", "zero 1", "zero 3", "pipe 2"))) - {("switch", "pipe 2")}


def is_quick(name, layout):
    quick = ("vit", "pipe 2"), ("peft gpt2", "tensor 2")
    return (name, layout) in quick or (name in MIXTURES and layout == "zero 3")


@pytest.mark.parametrize(
    ("name", "layout"),
    mostly_slow((one for one in sorted(CASES) if one[1] in LAYOUTS), lambda one: is_quick(*one)),
)
def test_a_model_trains_as_in_one_process_with_its_dropouts(folder, name, layout):
    if "peft" in name:
        pytest.importorskip("peft", reason="peft is not installed")
    np.testing.assert_allclose(losses(folder, name, layout), in_one_process(name), rtol=1e-10)


@pytest.mark.parametrize("name", mostly_slow(MODELS, ["llama"]))
def test_a_model_trains_as_torch_alone(folder, name):
    make, data, _ = MODELS[name]
    with Wide(), made(folder, lambda: without_dropout(make), data, micro_batches=2) as trainer:
        found = every_loss(trainer)
        wanted = alone(trainer, lambda: without_dropout(make))
    np.testing.assert_allclose(found, wanted, rtol=1e-10)


MOVES = [
    ("gpt2", "tensor 2", "zero 3"), ("gpt2", "pipe 2", "pipe 2"), ("llama", "data", "tensor 2"),
    ("bert mlm", "zero 3", "data"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "first", "then"), mostly_slow(MOVES, MOVES[:1]))
def test_a_run_goes_on_in_another_layout_and_from_pretrained_takes_it(
    comm, folder, name, first, then
):
    """Also with a head that is tied to an embedding on another stage; in one layout, bit by bit."""
    make, data, blocks = MODELS[name]
    given = {"checkpoint": {"every": 3}, "cuts": blocks if "pipe" in first else ()}
    before, after = LAYOUTS.get(first, {}), LAYOUTS.get(then, {})
    with Wide(), made(folder, make, data, **given, parallel=before) as trainer:
        trainer.fit()
        wanted = trainer.module.state_dict()
    again = given | {"dir": str(folder / "again")}
    with Wide(), made(folder, make, data, **again, parallel=before, steps=4) as trainer:
        trainer.fit()
    with Wide(), made(folder, make, data, **again, parallel=after) as trainer:
        trainer.fit(resume=True)
        whole = trainer.module
    rounding = {"rtol": 0, "atol": 0} if before == after else {"rtol": 1e-9, "atol": 1e-12}
    torch.testing.assert_close(dict(whole.state_dict()), dict(wanted), **rounding)
    if comm.rank == 0:
        whole.config.save_pretrained(folder / "model")
        export(folder / "again", folder / "model" / "model.safetensors", torch=True)
        other = type(whole).from_pretrained(folder / "model", dtype=torch.float64)
        some = torch.utils.data.default_collate([data(4, 3)[i] for i in range(4)])
        with torch.no_grad():
            wanted, found = whole.eval()(**some), other.eval()(**some)
        assert torch.equal(found.logits, wanted.logits)
        assert torch.equal(found.loss, wanted.loss)
