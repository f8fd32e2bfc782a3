"""TeleChat3, dense, such as TeleChat3-36B-Thinking.

Reference: mlx-lm, models/telechat3. The layers are Llama's. GGUF files have the architecture "llama".
"""

from __future__ import annotations

from mlx_engine.models import llama, standard

ARCHITECTURES = ("telechat3",)
GGUF_ARCHITECTURE = "llama"

Config = llama.Config
Model = standard.Model
plan = standard.plan(Config, llama.TENSORS | llama.PERMUTED)
