"""A decoder-only transformer (Radford et al. 2019), whole or shared by tensor ranks."""

from collections.abc import Callable, Mapping
from math import sqrt

from mpitrain import nn
from mpitrain.group import TensorGroup
from mpitrain.nn.embedding import PositionEmbedding, TokenEmbedding, Unembedding
from mpitrain.parallel.tensor_parallel import Enter, Leave


def layers(
    vocabulary: int,
    context: int,
    width: int,
    blocks: int,
    heads: int,
    group: TensorGroup,
    *,
    sequence: bool = False,
    dropout: float = 0.0,
    mixture: Callable[[Callable[[], nn.Layer]], nn.Layer] | None = None,
) -> dict[str, nn.Layer]:
    """Embedding, blocks of attention and perceptron with pre-norm, and the tied table's scores.

    Args:
        vocabulary: number of tokens.
        context: most positions of a sample.
        width: features of a position; the perceptron's hidden layer is four times as wide.
        blocks: number of blocks.
        heads: attention heads; their number divides the width.
        group: ranks that share each layer; one all-reduce forward and one backward for attention
            and perceptron each (Shoeybi et al. 2019).
        sequence: whether they also share the positions between these (Korthikanti et al. 2022).
        dropout: probability with which a position does not see another one in training.
        mixture: makes experts by a function that makes the perceptron between two norms, in whose
            place they stand; None: a perceptron alone.
    """

    def over_positions(layer: nn.Layer) -> nn.Layer:
        """A layer on one rank's positions has one rank's term of the gradients."""
        if sequence:
            layer.summed = frozenset({"weight", "bias"})
        return layer

    def out(inputs: int) -> nn.Layer:
        deviation = 0.02 / sqrt(2 * blocks)
        return nn.Linear(inputs, width, bias=False, split="inputs", deviation=deviation)

    def shared(inner: Mapping[str, nn.Layer]) -> nn.Layer:
        """Norm, the layers that the group shares, the last with split inputs, and the bias."""
        return nn.Residual(
            {
                "norm": over_positions(nn.LayerNorm(width)),
                "enter": Enter(group, sequence=sequence),
                **inner,
                "leave": Leave(group, sequence=sequence),
                "bias": over_positions(nn.Bias(width)),
            }
        )

    def attention() -> dict[str, nn.Layer]:
        qkv = nn.Linear(width, 3 * width, split="outputs", deviation=0.02)
        attend = nn.CausalAttention(width // heads, dropout, group)
        return {"qkv": qkv, "heads": attend, "out": out(width)}

    def perceptron() -> dict[str, nn.Layer]:
        up = nn.Linear(width, 4 * width, split="outputs", deviation=0.02)
        return {"up": up, "gelu": nn.GELU(), "out": out(4 * width)}

    def block() -> nn.Layer:
        mlp = {"experts": mixture(lambda: nn.Chain(perceptron()))} if mixture else perceptron()
        return nn.Chain({"attention": shared(attention()), "mlp": shared(mlp)})

    embedding = {
        "tokens": TokenEmbedding(vocabulary, width, group),
        "leave": Leave(group, sequence=sequence),
        "positions": PositionEmbedding(context, width, group, sequence=sequence),
    }
    head = {
        "norm": over_positions(nn.LayerNorm(width)),
        "enter": Enter(group, sequence=sequence),
        "scores": Unembedding(vocabulary, width, tied="embedding.tokens.token"),
    }
    every = {f"block{index}": block() for index in range(blocks)}
    return {"embedding": nn.Chain(embedding), **every, "head": nn.Chain(head)}
