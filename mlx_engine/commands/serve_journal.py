"""The journal of `serve`: the file that the user names, and what its lines say of the model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_engine.commands.console import notice
from mlx_engine.errors import require

if TYPE_CHECKING:
    from mlx_engine.serve.journal import Journal, Recorder
    from mlx_engine.serve.service import Service


def opened_journal(path: Path | None) -> Journal | None:
    """Return the journal that the user has asked for.

    Raises:
        OptionError: the file cannot be written.
    """
    from mlx_engine.serve.journal import Journal

    require(str(path) != "-", option="--journal", expected="a file", found="-")
    return None if path is None else Journal(path, warn=notice)


def recorder_of(service: Service, journal: Journal, source: str, options: Mapping[str, Any]) -> Recorder:
    """Return what writes the lines of a server whose model has been loaded.

    Args:
        service: the server.
        journal: the open journal.
        source: where the model was loaded from.
        options: the options of `load` that change its numbers.
    """
    from mlx_engine.checkpoint.identity import identity
    from mlx_engine.serve.journal import ModelId, Recorder

    engine = service.engine
    # A file is found again from any folder.
    where = str(Path(source).resolve()) if Path(source).exists() else source
    about = ModelId(service.model, where, identity(engine.path), dict(options))
    return Recorder(journal, about, backend=engine.backend.name, slots=service.worker.slots)
