"""A decoder-only transformer (Radford et al. 2019), whole or shared by tensor ranks."""

from math import sqrt

from mpitrain import nn
from mpitrain.group import TensorGroup
from mpitrain.nn.embedding import PositionEmbedding, TokenEmbedding, Unembedding
from mpitrain.parallel.tensor import Enter, Leave


def layers(
    *,
    vocabulary: int,
    context: int,
    width: int,
    blocks: int,
    heads: int,
    group: TensorGroup,
    sequence: bool,
) -> dict[str, nn.Layer]:
    """Embedding, blocks of attention and perceptron with pre-norm, and the tied table's scores.

    Args:
        vocabulary: tokens.
        context: most positions of a sample.
        width: of a position; the perceptron's is four times as wide.
        blocks: how many.
        heads: of attention; they divide the width.
        group: ranks that share each layer; one all-reduce forward and one backward for attention
            and perceptron each (Shoeybi et al. 2019).
        sequence: they share the positions of what lies between too (Korthikanti et al. 2022).
    """

    def over_positions(layer: nn.Layer) -> nn.Layer:
        """The gradients of what is computed on a part of the positions are a part of them."""
        if sequence:
            layer.summed = frozenset({"weight", "bias"})
        return layer

    def shared(inner: dict[str, nn.Layer], inputs: int) -> dict[str, nn.Layer]:
        """Norm, then what the group shares, ending with rows of a matrix and the bias."""
        return {
            "norm": over_positions(nn.LayerNorm(width)),
            "enter": Enter(group, sequence=sequence),
            **inner,
            "out": nn.Linear(
                inputs, width, bias=False, split="inputs", deviation=0.02 / sqrt(2 * blocks)
            ),
            "leave": Leave(group, sequence=sequence),
            "bias": over_positions(nn.Bias(width)),
        }

    def block() -> nn.Layer:
        attention: dict[str, nn.Layer] = {
            "qkv": nn.Linear(width, 3 * width, split="outputs", deviation=0.02),
            "heads": nn.CausalAttention(width // heads),
        }
        perceptron: dict[str, nn.Layer] = {
            "up": nn.Linear(width, 4 * width, split="outputs", deviation=0.02),
            "gelu": nn.GELU(),
        }
        return nn.Chain(
            {
                "attention": nn.Residual(shared(attention, width)),
                "mlp": nn.Residual(shared(perceptron, 4 * width)),
            }
        )

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
    return {
        "embedding": nn.Chain(embedding),
        **{f"block{index}": block() for index in range(blocks)},
        "head": nn.Chain(head),
    }
