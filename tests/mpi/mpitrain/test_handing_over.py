"""From the trainer into the files of Hugging Face and back."""

import pytest

from mpitrain.checkpoint.export import export
from mpitrain.training.evaluation import evaluate
from tests.mpi.mpitrain.fits import made

torch = pytest.importorskip("torch", reason="torch is not installed: make test TORCH=1")
torch.set_num_threads(1)
pytestmark = [pytest.mark.mpi, pytest.mark.at_most(4)]


def adamw(parameters):
    wide = [p for p in parameters if p.ndim > 1]
    flat = [p for p in parameters if p.ndim < 2]
    groups = [{"params": wide}, {"params": flat, "lr": 1e-3, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=3e-3, weight_decay=0.1, amsgrad=True)


class Sentences(torch.utils.data.Dataset):
    """Tokens, and the ones that follow."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        draw = torch.Generator().manual_seed(index)
        tokens = torch.randint(30, (9,), generator=draw)
        return tokens[:-1], tokens[1:]


def of_tokens(scores, labels):
    return torch.nn.functional.cross_entropy(scores.transpose(1, 2), labels)


@pytest.mark.parametrize(
    "parallel", [pytest.param({}, marks=pytest.mark.slow), {"zero": 3}], ids=str
)
def test_a_folder_of_hugging_face_takes_the_weights_and_gives_them(folder, comm, parallel):
    """Stopped, resumed, exported, loaded: the same scores to the last bit."""
    transformers = pytest.importorskip("transformers")

    class Scores(transformers.GPT2LMHeadModel):
        def forward(self, tokens):
            return super().forward(tokens).logits

    config = transformers.GPT2Config(
        vocab_size=30, n_positions=8, n_embd=16, n_layer=2, n_head=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    data = {"train_data": Sentences(), "test_data": Sentences(), "loss": of_tokens, "metrics": {}}
    asked = {"optimizer": adamw, "batch_size": 8, "dtype": "float32", "parallel": parallel} | data
    for steps in (4, 6):
        with made(folder, model=lambda: Scores(config), steps=steps, **asked) as trainer:
            last = trainer.fit(resume=True)[-1]
    tokens = torch.stack([Sentences()[index][0] for index in range(24)])
    scores = trainer.module.eval()(tokens)
    own, old = folder / "own", folder / "old"
    if comm.rank == 0:
        for where in (own, old):
            config.save_pretrained(where)
        assert export(folder / "run", own, torch=True).tensors == len(trainer.module.state_dict())
        torch.save(trainer.module.state_dict(), old / "pytorch_model.bin")
    comm.Barrier()
    for where in (own, old):
        plain = transformers.GPT2LMHeadModel.from_pretrained(where)
        assert torch.equal(plain.eval()(tokens).logits, scores)
        begun = asked | {"model": lambda where=where: Scores.from_pretrained(where)}
        with made(folder / where.name, **begun) as trainer:
            assert evaluate(trainer.parts, 0).test_loss == last.test_loss
