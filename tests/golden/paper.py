"""An independent Qwen3 in float64 NumPy, written from its paper and its reference implementation.

It shares no code with mlx_engine and reads files with the gguf package. Whole sequences only, no cache, and every key
is repeated for every query head.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np


class Paper:
    """The model of a GGUF file."""

    def __init__(self, path: Path) -> None:
        reader = gguf.GGUFReader(path)
        self.w = {t.name: gguf.quants.dequantize(t.data, t.tensor_type).astype(float) for t in reader.tensors}
        self.settings = {name: field.contents() for name, field in reader.fields.items()}

    def logits(self, ids: list[int]) -> np.ndarray:
        """Return logits at every position, (T, V)."""
        w, n = self.w, len(ids)
        x = w["token_embd.weight"][ids]
        future = np.triu(np.full((n, n), -np.inf), 1)
        for i in range(self.of("block_count")):

            def project(y: np.ndarray, name: str, blk: str = f"blk.{i}.") -> np.ndarray:
                return y @ w[f"{blk}{name}.weight"].T

            def norm(y: np.ndarray, name: str, blk: str = f"blk.{i}.") -> np.ndarray:
                return self.norm(y, blk + name)

            h = norm(x, "attn_norm")
            q, k, v = (self.split(project(h, name)) for name in ("attn_q", "attn_k", "attn_v"))
            q, k = self.rotate(norm(q, "attn_q_norm")), self.rotate(norm(k, "attn_k_norm"))
            group = len(q) // len(k)
            k, v = np.repeat(k, group, axis=0), np.repeat(v, group, axis=0)
            p = np.exp(q @ k.transpose(0, 2, 1) / np.sqrt(q.shape[-1]) + future)
            y = p / p.sum(axis=-1, keepdims=True) @ v
            x = x + project(np.concatenate(list(y), axis=-1), "attn_output")
            h = norm(x, "ffn_norm")
            gate = project(h, "ffn_gate")
            x = x + project(gate / (1 + np.exp(-gate)) * project(h, "ffn_up"), "ffn_down")
        return self.norm(x, "output_norm") @ w.get("output.weight", w["token_embd.weight"]).T

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        """RMS norm over the last axis."""
        mean = (x**2).mean(axis=-1, keepdims=True)
        return x / np.sqrt(mean + self.of("attention.layer_norm_rms_epsilon")) * self.w[f"{name}.weight"]

    def split(self, x: np.ndarray) -> np.ndarray:
        """(heads, T, head_dim)."""
        return np.stack(np.split(x, x.shape[-1] // self.of("attention.key_length"), axis=-1))

    def rotate(self, x: np.ndarray) -> np.ndarray:
        """RoPE: the halves of a head are complex numbers, rotated by position * theta ** (-j / half)."""
        half = x.shape[-1] // 2
        turns = np.outer(np.arange(x.shape[1]), self.of("rope.freq_base") ** (-np.arange(half) / half))
        z = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * turns)
        return np.concatenate((z.real, z.imag), axis=-1)

    def of(self, key: str) -> int | float:
        """Return a setting of the file."""
        return self.settings[f"qwen3.{key}"]
