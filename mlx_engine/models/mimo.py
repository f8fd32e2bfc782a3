"""MiMo 7B.

Report: "MiMo", arXiv 2505.07608. Reference: mlx-lm, models/mimo. The layers are Qwen2's; a layer of multi-token
prediction after them is ignored.
"""

from __future__ import annotations

from mlx_engine.models import qwen2, standard

ARCHITECTURES = ("mimo",)
GGUF_ARCHITECTURE = "qwen2"

Config, TENSORS = qwen2.Config, qwen2.TENSORS
Model = standard.Model
plan = standard.plan(Config, TENSORS)
