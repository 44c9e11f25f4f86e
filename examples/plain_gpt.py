"""A small GPT in plain torch: rotary positions, grouped-query attention, a mixture of SwiGLU experts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, KEY_HEADS, HEAD_WIDTH, FFN, EXPERTS, TOP_K, LAYERS, VOCABULARY = 32, 4, 2, 8, 48, 4, 2, 4, 256


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """Rotate halves of the heads of ``x`` [batch, tokens, heads, width]."""
    angles = torch.outer(positions, 10000 ** -(torch.arange(0, HEAD_WIDTH, 2) / HEAD_WIDTH))[:, None]
    a, b = x.chunk(2, -1)
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)


class Core(nn.Module):
    """Causal attention of [batch, tokens, heads, width]."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


class Experts(nn.Module):
    """Each token goes to the best experts, one expert after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * FFN) * WIDTH**-0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, FFN, WIDTH) * FFN**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        probs, chosen = self.router(x).softmax(-1).topk(TOP_K)
        weights = torch.zeros(*x.shape[:-1], EXPERTS).scatter(-1, chosen, probs / probs.sum(-1, keepdim=True))
        gates = [(x @ up).chunk(2, -1) for up in self.up]
        outputs = [(F.silu(a) * b) @ down for (a, b), down in zip(gates, self.down, strict=True)]
        return torch.stack(outputs, -1).mul(weights.unsqueeze(-2)).sum(-1)


class Block(nn.Module):
    """A layer. ``positions`` are those of the tokens that it gets."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.RMSNorm(WIDTH) for _ in range(2)])
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * KEY_HEADS) * HEAD_WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.core, self.experts, self.positions = Core(), Experts(), torch.arange(tokens)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (-1, HEAD_WIDTH))
        q, k, v = heads.split([HEADS, KEY_HEADS, KEY_HEADS], 2)
        x = x + self.out(self.core(rotated(q, self.positions), rotated(k, self.positions), v).flatten(2))
        return x + self.experts(self.norms[1](x))


class Loss(nn.Module):
    """Output layer and cross-entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.linear(hidden).flatten(0, 1), target.flatten())


class GPT(nn.Module):
    """From tokens and the tokens that follow them to the mean loss."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        blocks = [Block(tokens) for _ in range(LAYERS)]
        self.layers = nn.ModuleList([nn.Embedding(VOCABULARY, WIDTH), *blocks, nn.RMSNorm(WIDTH)])
        self.loss = Loss()

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:
        x = tokens
        for layer in self.layers:
            x = layer(x)
        return self.loss(x, target)
