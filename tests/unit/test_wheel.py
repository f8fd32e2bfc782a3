"""The wheel beside another distribution whose package is `kernels`, in environments of their own."""

import platform
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import mlx.core
import pytest

import mlx_engine
from kernels.cpu.build.prebuilt import TARGETS, instruction_sets
from tests.builtin import N_LAYERS

pytest.importorskip("hatchling")
pytest.importorskip("hatch_fancy_pypi_readme")
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PIP = ("-m", "pip", "--disable-pip-version-check", "-q")
INSTALL = (*PIP, "install", "--no-index", "--no-deps", "--ignore-installed", "--no-build-isolation")
THEIRS = "import kernels; assert kernels.OWNER == 'theirs', kernels"
OURS = (
    "import sys, mlx_engine; from mlx_engine import kernels\n"
    "engine = mlx_engine.load('builtin'); assert engine.generate('Once upon a time', max_tokens=4).text\n"
    f"assert engine.config.n_layers == {N_LAYERS} and kernels.split_q8_0 and kernels.launch.launch\n"
    "assert kernels.__name__ == 'mlx_engine.kernels', kernels\n"
    "assert [name for name in sys.modules if name.partition('.')[0] == 'kernels'] == []\n"
)


class Environment:
    """A virtual environment that has this one's packages, but for those that it has itself."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, with_pip=True, symlinks=True)
        self.folder, self.program = folder, folder / "bin" / "python"
        [packages] = folder.glob("lib/python*/site-packages")
        (packages / "dependencies.pth").write_text(str(Path(mlx.core.__file__).parents[1]) + "\n" + extra())
        self.packages = packages

    def run(self, *arguments: object) -> str:
        """Run Python outside the checkout; return what it has written to stdout."""
        command = [self.program, *map(str, arguments)]
        done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


def extra() -> str:
    import hatchling

    return str(Path(hatchling.__file__).parents[1])


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist, and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", folder], cwd=ROOT, check=True)
    [sdist] = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder)
    [source] = folder.glob("mlx_engine-*/")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder], cwd=source, check=True)
    [wheel] = folder.glob("*.whl")
    return source, wheel


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of another distribution that has the top-level package `kernels`."""
    wheel = tmp_path_factory.mktemp("other") / "kernels-1.0-py3-none-any.whl"
    files = {
        "kernels/__init__.py": "OWNER = 'theirs'\n",
        "kernels/launch.py": "",
        "kernels-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: kernels\nVersion: 1.0\n",
        "kernels-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files["kernels-1.0.dist-info/RECORD"] = "".join(f"{name},,\n" for name in (*files, "kernels-1.0.dist-info/RECORD"))
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return wheel


def test_the_wheel_has_no_top_level_kernels(built: tuple[Path, Path]):
    names = zipfile.ZipFile(built[1]).namelist()
    assert {name.partition("/")[0] for name in names if ".dist-info" not in name} == {"mlx_engine"}
    assert "mlx_engine/kernels/__init__.py" in names
    assert "mlx_engine/kernels.py" not in names
    inside = {str(path.relative_to(ROOT)) for path in (ROOT / "kernels").rglob("*") if path.suffix in (".py", ".metal")}
    assert inside <= {name.removeprefix("mlx_engine/") for name in names}


def test_the_sdist_has_tests_pages_and_tools(built: tuple[Path, Path]):
    for name in ("docs/kernels.md", "tests/conftest.py", "tools", "benchmarks", "kernels/cuda.cuh", "CONTRIBUTING.md"):
        assert (built[0] / name).exists()


def requirements(wheel: Path) -> list[str]:
    """What a wheel depends on without extras."""
    archive = zipfile.ZipFile(wheel)
    [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    lines = archive.read(name).decode().splitlines()
    return [line.partition(": ")[2] for line in lines if line.startswith("Requires-Dist: ") and "extra ==" not in line]


WITHOUT_A_COMPILER = (
    "import sys; sys.modules['numba'] = sys.modules['llvmlite'] = None\n"
    "import mlx_engine; engine = mlx_engine.load('builtin', 'parallel')\n"
    "assert type(engine.backend).__name__ == 'CompiledBackend', engine.backend\n"
    "print(engine.generate('Once upon a time', max_tokens=8).token_ids)"
)


def test_a_wheel_with_machine_code_runs_without_a_compiler(built: tuple[Path, Path], tmp_path: Path):
    pytest.importorskip("ziglang")
    [best, *_] = [name for name, target in TARGETS.items() if target.needs <= instruction_sets()]
    command = [sys.executable, "-m", "tools.wheel", "--target", best, "--only", "q8_0", "--out", tmp_path]
    subprocess.run(command, cwd=ROOT, check=True)
    [wheel] = tmp_path.glob("*.whl")
    assert platform.machine() in wheel.name
    assert sorted(requirements(built[1])) == sorted([*requirements(wheel), "numba>=0.60"])
    environment = Environment(tmp_path / "env")
    environment.run(*INSTALL, wheel)
    said = environment.run("-c", WITHOUT_A_COMPILER)
    assert said == f"{mlx_engine.load('builtin', 'simd').generate('Once upon a time', max_tokens=8).token_ids}\n"
    environment.run(*PIP, "uninstall", "-y", "mlx-engine")
    environment.run(*INSTALL, built[1])
    with pytest.raises(AssertionError, match="Numba, which compiles the kernels, is not installed: pip install numba"):
        environment.run("-c", WITHOUT_A_COMPILER)


def test_links_of_the_page_lead_somewhere_without_the_repository(built: tuple[Path, Path]):
    archive = zipfile.ZipFile(built[1])
    [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    head, _, page = archive.read(name).decode().partition("\n\n")
    assert "Project-URL: Repository, https://github.com/mlx-engine/mlx-engine" in head
    links = re.findall(r"\]\(([^)\s]+)", page)
    assert links
    assert [link for link in links if not link.startswith(("https://", "http://", "#"))] == []
    for path in (link.partition("/blob/main/")[2].partition("#")[0] for link in links if "mlx-engine/blob/" in link):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("is_first", [True, False], ids=["before the other", "after the other"])
def test_the_other_distribution_of_that_name_and_ours_both_work(built, other: Path, tmp_path: Path, is_first: bool):
    environment = Environment(tmp_path / "env")
    for wheel in (built[1], other) if is_first else (other, built[1]):
        environment.run(*INSTALL, wheel)
    environment.run("-c", OURS)
    environment.run("-c", f"{OURS}{THEIRS}")
    environment.run("-c", f"{THEIRS}\n{OURS.rpartition('assert [')[0]}")
    environment.run(*PIP, "uninstall", "-y", "mlx-engine")
    environment.run("-c", f"{THEIRS}; import kernels.launch")
    assert not (environment.packages / "mlx_engine").exists()


def test_an_editable_installation_leaves_the_other_its_name(other: Path, tmp_path: Path):
    environment = Environment(tmp_path / "env")
    environment.run(*INSTALL, "--editable", ROOT)
    environment.run(
        "-c", "import kernels, mlx_engine.kernels.cpu as cpu; assert cpu is kernels.cpu; import kernels.launch"
    )
    environment.run(*INSTALL, other)
    environment.run("-c", f"{OURS}{THEIRS}")
