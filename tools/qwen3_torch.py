"""A minimal Qwen3 in PyTorch, only for training the built-in model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Config:
    """The sizes of a model. The width of every matrix is a multiple of 256, the largest block size of GGUF types."""

    vocab: int = 2048
    hidden: int = 256
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    ffn: int = 512
    context: int = 1024
    theta: float = 10_000.0
    eps: float = 1e-6


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE: rotate each pair (i, i + half) by its position's angle."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Attention(nn.Module):  # type: ignore[misc]
    """Grouped-query attention with normalised queries and keys."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.q = nn.Linear(config.hidden, queries, bias=False)
        self.k = nn.Linear(config.hidden, keys, bias=False)
        self.v = nn.Linear(config.hidden, keys, bias=False)
        self.output = nn.Linear(queries, config.hidden, bias=False)
        self.q_norm = nn.RMSNorm(config.head_dim, eps=config.eps)
        self.k_norm = nn.RMSNorm(config.head_dim, eps=config.eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Apply causal attention."""
        batch, length, _ = x.shape
        split = (batch, length, -1, self.config.head_dim)
        q = rotate(self.q_norm(self.q(x).view(split)).transpose(1, 2), cos, sin)
        k = rotate(self.k_norm(self.k(x).view(split)).transpose(1, 2), cos, sin)
        v = self.v(x).view(split).transpose(1, 2)
        group = self.config.heads // self.config.kv_heads
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.output(mixed.transpose(1, 2).reshape(batch, length, -1))


class Block(nn.Module):  # type: ignore[misc]
    """One layer: attention, then a SwiGLU feed-forward."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(config.hidden, eps=config.eps)
        self.attn = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.hidden, eps=config.eps)
        self.gate = nn.Linear(config.hidden, config.ffn, bias=False)
        self.up = nn.Linear(config.hidden, config.ffn, bias=False)
        self.down = nn.Linear(config.ffn, config.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Add the outputs of attention and feed-forward to the residual stream."""
        x = x + self.attn(self.attn_norm(x), cos, sin)
        y = self.ffn_norm(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Qwen3(nn.Module):  # type: ignore[misc]
    """The whole model, from token ids to logits."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab, config.hidden)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden, eps=config.eps)
        half = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        angles = torch.outer(torch.arange(config.context, dtype=torch.float32), config.theta**-half)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self.initialize()

    def initialize(self) -> None:
        """Initialise weights with a small spread, smaller for projections into the residual stream."""
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                into_residual = name.endswith(("output.weight", "down.weight"))
                scale = (2 * self.config.layers) ** -0.5 if into_residual else 1.0
                nn.init.normal_(weight, std=0.02 * scale)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits at every position. The output head is tied to the embedding."""
        length = tokens.shape[1]
        cos, sin = self.cos[:length], self.sin[:length]
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        return functional.linear(self.norm(x), self.embed.weight)
