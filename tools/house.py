"""Print code-size statistics, one per line: `python tools/house.py [TREE [TREE]]`.

For two trees, such as worktrees of two commits, two columns are printed. "Product" in the names of the figures means
the Python code of `mlx_engine` and `kernels`. The importers of a module are all modules with an import statement for
it, also in functions and under `if TYPE_CHECKING`.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

PRODUCT = ("mlx_engine", "kernels")


def main(*trees: str) -> None:
    """Print the figures of the given trees, or of this tree."""
    roots = [Path(tree).resolve() for tree in trees] or [Path(__file__).parents[1]]
    columns = [figures(root) for root in roots]
    for name in columns[0]:
        print(f"{name:<56}", *(f"{column[name]:>10,}" for column in columns))


def figures(root: Path) -> dict[str, int]:
    """Return the figures of a tree by their names."""
    texts = {path: path.read_text() for path in sources(root)}
    return {
        "product: lines": sum(text.count("\n") for text in texts.values()),
        "product: modules": len(texts),
        "modules with one importer, in their own folder": len(single_importers(root, texts)),
        "modules with one importer": len(single_importers(root, texts, anywhere=True)),
        "fields of Layer that may be None": sum(map(optional_fields, texts.values())),
        "product files that name min_p": sum(bool(re.search(r"\bmin_p\b", text)) for text in texts.values()),
        "mutants": mutants(root),
        "README: lines": (root / "README.md").read_text().count("\n"),
    }


def sources(root: Path) -> list[Path]:
    """Return the Python files of the product."""
    return [path for folder in PRODUCT for path in sorted((root / folder).rglob("*.py"))]


def module_of(root: Path, path: Path) -> str:
    """Return the dotted module name of a file."""
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def single_importers(root: Path, texts: dict[Path, str], *, anywhere: bool = False) -> list[str]:
    """Return the modules that exactly one other product module imports.

    Without `anywhere`, the importer must be in the same folder. Packages (`__init__.py`) are left out.
    """
    paths = {module_of(root, path): path for path in texts}
    importers: dict[str, set[str]] = defaultdict(set)
    for name, path in paths.items():
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        for imported in imports(ast.parse(texts[path]), package):
            if imported in paths and imported != name:
                importers[imported].add(name)
    return [
        name
        for name, of in importers.items()
        if len(of) == 1
        and paths[name].name != "__init__.py"
        and (anywhere or paths[name].parent == paths[min(of)].parent)
    ]


def imports(tree: ast.Module, package: str) -> Iterator[str]:
    """Yield the dotted names that a module imports: of modules, and of names in modules, which may be modules too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            base = base.removeprefix("mlx_engine.") if base.startswith("mlx_engine.kernels") else base
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def optional_fields(text: str) -> int:
    """Return the number of fields of a class `Layer` in this module that may be None, by their annotations."""
    if "class Layer" not in text:
        return 0
    classes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef) and node.name == "Layer"]
    fields = [node for of in classes for node in of.body if isinstance(node, ast.AnnAssign)]
    return sum(bool(re.search(r"\bNone\b|\bOptional\b", ast.unparse(field.annotation))) for field in fields)


def mutants(root: Path) -> int:
    """Return the number of mutants of the tests, from `tests.mutants.bugs`, or `tests.mutants` in older trees."""
    program = """
try:
    from tests.mutants.bugs import MUTANTS
except ImportError:
    from tests.mutants import MUTANTS
print(len(MUTANTS))
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=True)
    return int(done.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
