"""The device that MLX uses on this machine, and its memory settings."""

from __future__ import annotations

import mlx.core as mx


def kind() -> str:
    """Return the kind of MLX's default device: "metal", "cuda" or "cpu"."""
    if mx.default_device().type == mx.DeviceType.cpu:
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def description() -> str:
    """Return the kind of the device, with a GPU's name if MLX reports one: "metal (Apple M3 Max)"."""
    name = None if kind() == "cpu" else mx.device_info().get("device_name")
    return f"{kind()} ({name})" if name else kind()


def keep_weights_resident() -> None:
    """Set MLX's wired memory limit to the size that Metal recommends, so that weights are not paged out. Metal only.

    The limit is process-wide and must not change during a computation, so it is set before the first one.
    """
    if kind() == "metal":
        mx.set_wired_limit(int(mx.device_info()["max_recommended_working_set_size"]))
