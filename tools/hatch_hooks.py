"""Hooks of the build with Hatch: set the dependencies of a wheel, and add the machine code of the kernels to it.

`tools/wheel.py` compiles the machine code, and sets the environment variables that these hooks read.
"""

from __future__ import annotations

import os
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

# Environment variables: the folder with the machine code, and the platform in the wheel's tag.
FOLDER, PLATFORM = "MLX_ENGINE_PREBUILT", "MLX_ENGINE_PREBUILT_PLATFORM"


class Dependencies(MetadataHookInterface):
    """Set the dependencies: those in this hook's settings, and without machine code those of the extra `compiler`."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the dependencies."""
        always, compiler = self.config["dependencies"], metadata["optional-dependencies"]["compiler"]
        metadata["dependencies"] = always if os.environ.get(FOLDER) else [*always, *compiler]


class MachineCode(BuildHookInterface[Any]):
    """Add the libraries with the machine code, and their manifest, to a wheel for one platform."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the libraries to the wheel, if `tools/wheel.py` has named their folder."""
        folder = os.environ.get(FOLDER)
        if folder:
            build_data["force_include"][folder] = "mlx_engine/kernels/cpu/prebuilt"
            build_data["tag"] = f"py3-none-{os.environ[PLATFORM]}"
            build_data["pure_python"] = False
