"""A small GPT (Radford et al., 2019) that predicts the next token.

Its parameters may be those of W models, (W, ...): the input then has a part for each, (W, B, T).
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regtopk.lab.experiments.networks.norm import LayerNorm


class LinearOfMany(torch.autograd.Function):
    """weight x + bias of W models. Its gradient of the weights is in their order, which autograd's is not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """From x (W, B, in), weight (W, out, in) and bias (W, out)."""
        ctx.save_for_backward(x, weight)
        return torch.baddbmm(bias.unsqueeze(1), x, weight.mT)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        """Of all three."""
        x, weight = ctx.saved_tensors
        return torch.bmm(grad, weight), torch.bmm(grad.mT, x), grad.sum(1)


class Linear(nn.Linear):
    """A linear layer of one model, or of W models."""

    def forward(self, x: Tensor) -> Tensor:
        """weight x + bias."""
        if self.weight.dim() == 2:
            return super().forward(x)
        out: Tensor = LinearOfMany.apply(x.flatten(1, -2), self.weight, self.bias)  # type: ignore[no-untyped-call]
        return out.view(*x.shape[:-1], -1)


class GptBlock(nn.Module):
    """Causal attention, then a perceptron, each on a normalised input and added to its path.

    The path is in float32. Linear layers and attention compute in the precision of their weights, as under
    torch's autocast.
    """

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1 = LayerNorm(width)
        self.attention_in = Linear(width, 3 * width)  # queries, keys and values
        self.attention_out = Linear(width, width)
        self.norm2 = LayerNorm(width)
        self.hidden_in = Linear(width, 4 * width)
        self.hidden_out = Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """x + attention(norm(x)), then x + perceptron(norm(x))."""
        x = x + self._attend(self.norm1(x))
        normed = self.norm2(x).to(self.hidden_in.weight.dtype)
        hidden: Tensor = self.hidden_out(F.gelu(self.hidden_in(normed)))
        return x + hidden

    def _attend(self, x: Tensor) -> Tensor:
        x = x.to(self.attention_in.weight.dtype)
        heads = self.attention_in(x).flatten(0, -3).unflatten(-1, (3, self.num_heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # of (B, heads, T, width / heads)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.attention_out(mixed.transpose(1, 2).reshape(x.shape))
        return out


class GPT(nn.Module):
    """A decoder without dropout whose output layer is the embedding of the tokens.

    `context` is the most tokens it looks back on. The width between blocks is a multiple of num_heads.
    """

    def __init__(
        self, num_tokens: int, context: int = 128, width: int = 128, num_layers: int = 4, num_heads: int = 4
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(num_tokens, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(GptBlock(width, num_heads) for _ in range(num_layers)))
        self.norm = LayerNorm(width)
        for name, parameter in self.named_parameters():  # as GPT-2: what adds to the stream starts smaller
            if parameter.dim() > 1:
                is_added = name.endswith(("attention_out.weight", "hidden_out.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * num_layers) if is_added else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores of the next token (B, T, num_tokens) after each of tokens (B, T), T <= context."""
        embedding, position = self.token.weight, self.position.weight[..., : tokens.shape[-1], :].float()
        if embedding.dim() == 2:
            x = self.token(tokens).float() + position
            return F.linear(self.norm(self.blocks(x)).to(embedding.dtype), embedding)
        first = torch.arange(len(tokens), device=tokens.device).view(-1, 1, 1) * embedding.shape[1]
        x = F.embedding(tokens + first, embedding.flatten(0, 1)).float() + position.unsqueeze(1)
        last = self.norm(self.blocks(x)).to(embedding.dtype)
        return torch.bmm(last.flatten(1, 2), embedding.mT).view(*tokens.shape, -1)
