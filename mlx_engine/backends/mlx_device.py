"""Where MLX computes on this machine, and what has to be arranged there before it does."""

from __future__ import annotations

import mlx.core as mx


def kind() -> str:
    """What MLX's default device is: "metal", "cuda" or "cpu"."""
    if mx.default_device().type == mx.DeviceType.cpu:
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def description() -> str:
    """The kind, and for a GPU its name where MLX knows it: "metal (Apple M3 Max)"."""
    name = None if kind() == "cpu" else mx.device_info().get("device_name")
    return f"{kind()} ({name})" if name else kind()


def keep_weights_resident() -> None:
    """Let the system page nothing out that the GPU uses, up to the size that Metal recommends. Metal alone needs it.

    The limit belongs to the process and must not change while something is computed, so it is set before anything is.
    """
    if kind() == "metal":
        mx.set_wired_limit(int(mx.device_info()["max_recommended_working_set_size"]))
