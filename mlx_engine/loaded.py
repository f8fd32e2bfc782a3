"""A loaded model that can be closed, and stays in its process."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import NoReturn, TypeVar

from mlx_engine.errors import ClosedError, NotCopyableError
from mlx_engine.weights.model import Model

Self = TypeVar("Self", bound="LoadedModel")


class LoadedModel:
    """A model on a backend, until it is closed."""

    def __init__(self, model: Model, path: Path, about: str) -> None:
        """Hold a model.

        Args:
            model: the model.
            path: its file or folder.
            about: architecture, size and types, for `repr`.
        """
        self._model: Model | None = model
        self.path, self._about = path, about

    @property
    def model(self) -> Model:
        """The model.

        Raises:
            ClosedError: the engine has been closed.
        """
        if self._model is None:
            raise ClosedError
        return self._model

    def close(self) -> None:
        """Free the weights and end the backend's threads, after the forward pass that another thread may be running.

        Every later call raises ClosedError, also of streams and schedulers that were made before.
        """
        model, self._model = self._model, None
        if model is not None:
            model.backend.close()

    def __enter__(self: Self) -> Self:
        """Return the engine itself.

        Raises:
            ClosedError: the engine has been closed.
        """
        _ = self.model
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        if self._model is None:
            state = "closed"
        else:
            be = self._model.backend
            state = f"{self._about}, {be.name} on {be.device}"
        return f"<{type(self).__name__} {self.path.name}: {state}>"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise NotCopyableError(name="engine", hint="load the model in each process")
