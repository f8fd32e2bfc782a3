"""`kernels` and `mlx_engine.kernels` in a checkout."""

import ast
import importlib
import importlib.util
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SAME = (
    "import sys\n"
    "for name in ('', '.blocks', '.cpu.build.layout', '.cpu.products.order_numpy', '.metal'):\n"
    "    ours, theirs = sys.modules['mlx_engine.kernels' + name], sys.modules['kernels' + name]\n"
    "    assert ours is theirs and ours.__spec__.name == ours.__name__ == 'kernels' + name, ours\n"
)
MODULES = "import {0}.blocks, {0}.cpu.build.layout, {0}.cpu.products.order_numpy, {0}.metal\n"


def python(code: str, path: Path = ROOT, *more: Path) -> None:
    program = f"import sys; sys.path[:0] = {[str(path), *map(str, more)]}\n{code}"
    done = subprocess.run([sys.executable, "-P", "-c", program] if sys.version_info >= (3, 11) else
                          [sys.executable, "-c", program], cwd="/", capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.some(1)
@pytest.mark.parametrize("names", [("kernels", "mlx_engine.kernels"), ("mlx_engine.kernels", "kernels")])
def test_both_names_have_the_same_modules_whichever_is_imported_first(names: tuple[str, str]):
    python("".join(map(MODULES.format, names)) + SAME)


def test_a_folder_of_that_name_before_ours_keeps_it(tmp_path: Path):
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("OWNER = 'theirs'")
    code = (
        "import mlx_engine.kernels.blocks, kernels; from mlx_engine.kernels import launch\n"
        "assert kernels.OWNER == 'theirs' and launch.__name__ == 'mlx_engine.kernels.launch'\n"
        "assert not hasattr(mlx_engine.kernels, 'OWNER') and mlx_engine.kernels.Kernel is launch.Kernel\n"
    )
    python(code, tmp_path, ROOT)


def test_a_module_that_does_not_exist_is_missed_by_the_name_that_was_asked_for():
    assert importlib.util.find_spec("mlx_engine.kernels.nothing") is None
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'mlx_engine\.kernels\.nothing'"):
        importlib.import_module("mlx_engine.kernels.nothing")


def test_pickles_and_reloading_see_one_module():
    module = importlib.import_module("mlx_engine.kernels.blocks")
    from mlx_engine.kernels.kernel import Kernel

    kernel = Kernel("name", ("x",), ("y",), "y[0] = x[0];")
    assert pickle.loads(pickle.dumps(kernel)) == kernel
    assert importlib.reload(module) is sys.modules["kernels.blocks"] is sys.modules["mlx_engine.kernels.blocks"]


def test_the_engine_imports_kernels_below_its_own_name_and_kernels_imports_relatively():
    wrong = []
    for top in ("kernels", "mlx_engine"):
        refused = {"kernels", "mlx_engine"} if top == "kernels" else {"kernels"}
        for path in (ROOT / top).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            # Few files have such a line, some of them in a docstring. To parse all files would take seconds.
            if not re.search(rf"\b(from|import) (.*\b)?({'|'.join(refused)})\b", text):
                continue
            for node in ast.walk(ast.parse(text)):
                names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
                roots = {name.partition(".")[0] for name in names}
                wrong += [path] if roots & refused else []
    assert wrong == []


@pytest.mark.slow
def test_no_part_of_the_engine_takes_public_names_from_the_package_itself():
    """The import contracts cannot tell such an import from one of `mlx_engine.kernels.NAME`."""
    import mlx_engine

    taken = []
    for path in (ROOT / "mlx_engine").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module == "mlx_engine" and not node.level:
                taken += [(path, one.name) for one in node.names if one.name in {*mlx_engine.__all__} - {"errors"}]
    assert taken == []
