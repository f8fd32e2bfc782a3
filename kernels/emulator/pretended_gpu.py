"""The default device that programs see in `emulate` on a machine without a GPU."""

from __future__ import annotations

import mlx.core as mx


class PretendedGPU(mx.Device):
    """MLX's CPU under the name of a GPU.

    Its string and its `type` are those of a GPU, and MLX's functions compute on the CPU with it. It equals both types
    of devices, because `mx.gpu` is `mx.cpu` in `emulate`.
    """

    def __init__(self) -> None:
        super().__init__(mx.cpu)

    @property
    def type(self) -> mx.DeviceType:
        """The type of a GPU."""
        return mx.DeviceType.gpu

    def __repr__(self) -> str:
        return "Device(gpu, 0)"

    __str__ = __repr__

    def __eq__(self, other: object) -> bool:
        return other == mx.DeviceType.gpu or super().__eq__(other)

    def __hash__(self) -> int:
        return hash(str(self))
