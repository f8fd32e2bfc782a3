"""Import the folder `kernels` as `mlx_engine.kernels`.

In a checkout, the folder is next to the package `mlx_engine`. In a wheel, it is inside the package, and this file is
left out.

If `import kernels` finds our folder, the names `kernels` and `mlx_engine.kernels` refer to the same module objects. If
another installed distribution is called `kernels`, `import kernels` still imports that distribution, and our folder is
imported only as `mlx_engine.kernels`.
"""

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

_INIT = Path(__file__).resolve().parents[1] / "kernels" / "__init__.py"


class _SameModules(MetaPathFinder, Loader):
    """Make `import mlx_engine.kernels.NAME` return the module `kernels.NAME`."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return a spec if `name` is below `mlx_engine.kernels` and the module exists, else None."""
        if not name.startswith(f"{__name__}."):
            return None
        found = importlib.util.find_spec(name.removeprefix("mlx_engine."))
        if found is None:
            return None
        is_package = found.submodule_search_locations is not None
        return importlib.util.spec_from_loader(name, self, origin=found.origin, is_package=is_package)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Import `kernels.NAME`, and save its `__spec__`, which the import system replaces after this call."""
        module = importlib.import_module(spec.name.removeprefix("mlx_engine."))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the module's own `__spec__`. The module's code has already run, in `create_module`."""
        if module.__spec__ is not None:
            module.__spec__ = module.__spec__.loader_state


def _is_ours(name: str) -> bool:
    """Return whether the import system finds our folder under a name."""
    try:
        found = importlib.util.find_spec(name)
    except ValueError:  # raised if the module is imported already, and its `__spec__` is None
        return False
    return found is not None and found.origin is not None and Path(found.origin).resolve() == _INIT


if _is_ours("kernels"):
    sys.modules[__name__] = importlib.import_module("kernels")
    sys.meta_path.insert(0, _SameModules())
else:
    _spec = importlib.util.spec_from_file_location(__name__, _INIT, submodule_search_locations=[str(_INIT.parent)])
    if _spec is None or _spec.loader is None:
        raise ImportError(f"{_INIT} cannot be imported")
    sys.modules[__name__] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules[__name__])
