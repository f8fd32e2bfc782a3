"""Rules of the repository: import layers, file sizes, American names, links, and what README promises."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tokenize
from functools import cache
from pathlib import Path

import mlx_engine
from tests.cells import each
from tests.mutants.bugs import MUTANTS

ROOT = Path(__file__).parents[1]
SOURCES = sorted([*(ROOT / "mlx_engine").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")])
PYTHON = sorted([*SOURCES, *(ROOT / "tests").rglob("*.py")])
BRITISH = re.compile(r"(?i)(quant|normal|recogn|initial|optim|penal)is|(behavi|neighb|col|fav)our|catalogue|centred")


def test_imports_keep_to_their_layers():
    command = [Path(sys.executable).parent / "lint-imports", "--no-cache"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert " 0 broken" in result.stdout


def test_changelog_begins_with_the_version_or_what_follows_it():
    heads = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert next(head for head in heads if head != "Unreleased") == mlx_engine.__version__
    assert "Unreleased" not in heads[1:]


PAGES = (
    *("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "BENCHMARKS.md"),
    *("tools/README.md", "mlx_engine/assets/MODEL_CARD.md"),
    *("kernels/emulator/README.md", "kernels/lab/README.md"),
    *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").glob("*.md"))),
)


@each("page", PAGES)
def test_links_lead_somewhere(page: str):
    text = (ROOT / page).read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        if not target.startswith("http"):
            assert ((ROOT / page).parent / target).exists(), f"{page}: {target}"


def test_the_readme_is_read_in_two_minutes():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_architecture_names_every_folder():
    text = (ROOT / "ARCHITECTURE.md").read_text()
    folders = {p.parent.name for p in (ROOT / "mlx_engine").glob("*/__init__.py")} | {
        "assets",
        "kernels",
        "tools",
        "tests",
    }
    assert {f for f in folders if f"{f}/ " not in text} == set()


PAGES_OF_FILES = (
    *("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "kernels/emulator/README.md", "kernels/lab/README.md"),
    *("tools/README.md", "docs/machines.md", "docs/exactness.md", "docs/models.md", "docs/benchmarks.md"),
)


@cache
def sources_of_classes() -> dict[str, list[str]]:
    """Return the texts of the files that define a class, by its name."""
    found: dict[str, list[str]] = {}
    for source in (path.read_text() for path in SOURCES):
        for name in re.findall(r"^class (\w+)", source, re.MULTILINE):
            found.setdefault(name, []).append(source)
    return found


@cache
def files_and_folders() -> list[str]:
    """Return the paths below the repository's folders, each with a slash before it, and behind it if it is a folder."""
    folders = ("mlx_engine", "kernels", "docs", "benchmarks", "tools", "tests")
    paths = [*ROOT.glob("*"), *(path for folder in folders for path in (ROOT / folder).rglob("*"))]
    return [f"/{path.relative_to(ROOT)}{'/' * path.is_dir()}" for path in paths]


@each("page", PAGES_OF_FILES)
def test_a_page_names_files_and_classes_that_exist(page: str):
    text = (ROOT / page).read_text()
    files = files_and_folders()
    named = re.findall(r"(?<![\w/.-])[\w][\w/.-]*\.(?:py|md|h\.metal)\b", text) + re.findall(r"`([\w/.-]+/)`", text)
    named = [name for name in named if not re.search(r"NAME|SUBJECT|TYPE|FOLDER", name)]
    # A page may leave out the first folders: `loop/runner.py`.
    assert [name for name in named if not any(file.endswith(f"/{name}") for file in files)] == []
    for name, attribute in re.findall(r"`([A-Z][a-z]\w+|KV\w+)(?:\.(\w+))?`", text):
        homes = sources_of_classes().get(name, ())
        assert homes, name
        has = re.compile(rf"(def |self\.|^    ){attribute}\b", re.MULTILINE)
        assert any(map(has.search, homes)), f"{name}.{attribute}"


def test_the_tree_of_architecture_is_the_one_on_disk():
    (tree,) = re.findall(r"## Where things are\n\n```\n(.*?)\n```", (ROOT / "ARCHITECTURE.md").read_text(), re.DOTALL)
    above: list[str] = []
    for line in tree.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        above = [*above[:depth], line.split()[0]]
        assert (ROOT / "/".join(above)).exists(), above


@each("path", SOURCES)
def test_names_are_spelled_the_american_way(path: Path):
    # Most files have no such word at all, not even in prose, and need not be divided into tokens.
    if not BRITISH.search(text := f"{path.stem} {path.read_text()}"):
        return
    tokens = tokenize.generate_tokens(io.StringIO(text.removeprefix(f"{path.stem} ")).readline)
    names = {path.stem, *(token.string for token in tokens if token.type == tokenize.NAME)}
    assert {name for name in names if BRITISH.search(name)} == set()


def test_no_hint_installs_this_project_from_an_index():
    pages = [*SOURCES, ROOT / "README.md"]
    assert [path for path in pages if re.search(r"pip install\W+mlx[-_]engine", path.read_text())] == []


def test_readme_gives_two_commands_for_a_fresh_machine():
    first_screen = (ROOT / "README.md").read_text().split("\n## ")[0]
    blocks = re.findall(r"```sh\n(.*?)\n```", first_screen, flags=re.DOTALL)
    assert len(blocks) == 2
    assert all("\n" not in block and "-m venv" in block for block in blocks)
    assert "generate --backend metal --kv" in blocks[0]
    assert " -m pytest -n auto" in blocks[1]


def test_every_public_name_can_be_imported():
    assert mlx_engine.__all__ == sorted(mlx_engine.__all__)
    assert [name for name in mlx_engine.__all__ if not hasattr(mlx_engine, name)] == []


def test_mutants_are_few():
    """One for each promise, at the seams; `make mutants` makes all those of a module."""
    assert len(MUTANTS) <= 150
