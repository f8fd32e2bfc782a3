"""Hooks of the build: the dependencies of a wheel, and its machine code (`tools/wheel.py`)."""

from __future__ import annotations

import os
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

# Variables with the folder of the machine code, and the platform of the wheel's tag.
FOLDER, PLATFORM = "MLX_ENGINE_PREBUILT", "MLX_ENGINE_PREBUILT_PLATFORM"


class Dependencies(MetadataHookInterface):
    """The dependencies: those in this hook's settings, and without machine code the extra `compiler`."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the dependencies."""
        always, compiler = self.config["dependencies"], metadata["optional-dependencies"]["compiler"]
        metadata["dependencies"] = always if os.environ.get(FOLDER) else [*always, *compiler]


class MachineCode(BuildHookInterface[Any]):
    """The libraries and their manifest, in a wheel of one platform."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the libraries to the wheel, if there are any."""
        folder = os.environ.get(FOLDER)
        if folder:
            build_data["force_include"][folder] = "mlx_engine/kernels/cpu/prebuilt"
            build_data["tag"] = f"py3-none-{os.environ[PLATFORM]}"
            build_data["pure_python"] = False
