"""A decoder-only transformer (Radford et al. 2019), whole or shared by tensor ranks."""

from dataclasses import dataclass
from math import sqrt

from mpitrain import nn
from mpitrain.group import TensorGroup
from mpitrain.nn.embedding import PositionEmbedding, TokenEmbedding, Unembedding
from mpitrain.parallel.tensor_parallel import Enter, Leave


@dataclass(frozen=True, kw_only=True)
class GPT:
    """Embedding, blocks of attention and perceptron with pre-norm, and the tied table's scores.

    Attributes:
        vocabulary: number of tokens.
        context: most positions of a sample.
        width: features of a position; the perceptron's hidden layer is four times as wide.
        blocks: number of blocks.
        heads: attention heads; their number divides the width.
        group: ranks that share each layer; one all-reduce forward and one backward for attention
            and perceptron each (Shoeybi et al. 2019).
        sequence: whether they also share the positions between these (Korthikanti et al. 2022).
    """

    vocabulary: int
    context: int
    width: int
    blocks: int
    heads: int
    group: TensorGroup
    sequence: bool

    def layers(self) -> dict[str, nn.Layer]:
        """The layers by name, in order."""
        embedding = {
            "tokens": TokenEmbedding(self.vocabulary, self.width, self.group),
            "leave": Leave(self.group, sequence=self.sequence),
            "positions": PositionEmbedding(
                self.context, self.width, self.group, sequence=self.sequence
            ),
        }
        head = {
            "norm": self._over_positions(nn.LayerNorm(self.width)),
            "enter": Enter(self.group, sequence=self.sequence),
            "scores": Unembedding(self.vocabulary, self.width, tied="embedding.tokens.token"),
        }
        return {
            "embedding": nn.Chain(embedding),
            **{f"block{index}": self._block() for index in range(self.blocks)},
            "head": nn.Chain(head),
        }

    def _block(self) -> nn.Layer:
        width = self.width
        attention: dict[str, nn.Layer] = {
            "qkv": nn.Linear(width, 3 * width, split="outputs", deviation=0.02),
            "heads": nn.CausalAttention(width // self.heads),
        }
        perceptron: dict[str, nn.Layer] = {
            "up": nn.Linear(width, 4 * width, split="outputs", deviation=0.02),
            "gelu": nn.GELU(),
        }
        return nn.Chain(
            {
                "attention": nn.Residual(self._shared(attention, width)),
                "mlp": nn.Residual(self._shared(perceptron, 4 * width)),
            }
        )

    def _shared(self, inner: dict[str, nn.Layer], inputs: int) -> dict[str, nn.Layer]:
        """Norm, the layers that the group shares, a matrix with split inputs, and the bias."""
        deviation = 0.02 / sqrt(2 * self.blocks)
        return {
            "norm": self._over_positions(nn.LayerNorm(self.width)),
            "enter": Enter(self.group, sequence=self.sequence),
            **inner,
            "out": nn.Linear(inputs, self.width, bias=False, split="inputs", deviation=deviation),
            "leave": Leave(self.group, sequence=self.sequence),
            "bias": self._over_positions(nn.Bias(self.width)),
        }

    def _over_positions(self, layer: nn.Layer) -> nn.Layer:
        """A layer on one rank's positions has one rank's term of the gradients."""
        if self.sequence:
            layer.summed = frozenset({"weight", "bias"})
        return layer
