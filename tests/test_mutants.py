"""Every mutant has its place in the code, and is found there by syntax; running them is `python -m tests.mutants`."""

from pathlib import Path

import pytest

from tests.cells import each
from tests.mutants.__main__ import chosen
from tests.mutants.bugs import MUTANTS
from tests.mutants.executed import MOST_SECONDS, Executed
from tests.mutants.near import LISTED, near
from tests.mutants.plant import Mutant, NotFoundError, found, planted

ROOT = Path(__file__).parents[1]
SOURCE = '''\
"""A file."""


class Row:
    def total(self, values):  # é comes before the places on its line
        text = "é"; found = sum(values, start=0)
        for value in values:
            # a comment that stays
            found += (value
                      + 1)
        return found, text

    def other(self, values):
        return sum(values, start=0)


def total(values):
    return sum(values, start=0)
'''


@each("mutant", MUTANTS)
def test_bug_can_be_planted(mutant: Mutant):
    file, where = found(mutant, ROOT)
    source = (ROOT / file).read_text()
    text = planted(mutant, source, where)
    assert text != source
    compile(text, file, "exec")


def test_names_are_unique_and_there_are_few():
    assert 100 <= len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) <= 200


def test_a_bug_is_found_wherever_its_function_is(tmp_path: Path):
    for name in ("rope", "norms"):
        (tmp_path / "mlx_engine" / name).mkdir(parents=True)
        (tmp_path / "mlx_engine" / name / "row.py").write_text(SOURCE.replace("start=0", f"start={name!r}"))
    assert found(Mutant("x", "Row.other", "sum(values, start='rope')", "0"), tmp_path) == (
        "mlx_engine/rope/row.py",
        "Row.other",
    )
    assert found(Mutant("x", "norms.row.total", "values", "0"), tmp_path)[0] == "mlx_engine/norms/row.py"
    with pytest.raises(NotFoundError, match=r"in one file, found mlx_engine/norms/row\.py, mlx_engine/rope/row\.py"):
        found(Mutant("x", "row.total", "values", "0"), tmp_path)
    with pytest.raises(NotFoundError, match=r"a function of this name, 'Row\.missing' in one file, found none"):
        found(Mutant("x", "Row.missing", "values", "0"), tmp_path)
    with pytest.raises(NotFoundError, match="the code 'nothing' in one file, found none"):
        found(Mutant("x", "norms.row.Row.total", "nothing", "0"), tmp_path)


def lines_after(where: str, old: str, new: str) -> list[tuple[str, str]]:
    """The lines of SOURCE that differ, where there are as many as before."""
    after = planted(Mutant("x", where, old, new), SOURCE, where).splitlines()
    before = SOURCE.splitlines()
    assert len(after) == len(before)
    return [(a.strip(), b.strip()) for a, b in zip(before, after, strict=True) if a != b]


def test_an_expression_is_replaced_in_one_function_alone():
    assert lines_after("Row.other", "sum( values,start = 0 )", "0") == [("return sum(values, start=0)", "return (0)")]
    assert len(lines_after("Row", "sum(values, start=0)", "0")) == 2
    assert len(lines_after("", "sum(values, start=0)", "0")) == 3


def test_bytes_before_a_place_may_be_more_than_characters():
    (changed,) = lines_after("Row.total", "sum(values, start=0)", "0")
    assert changed[1] == 'text = "é"; found = (0)'


def test_line_breaks_and_parentheses_do_not_matter():
    after = planted(Mutant("x", "Row.total", "found += value + 1", "pass"), SOURCE, "Row.total")
    assert "            # a comment that stays\n            pass\n        return" in after


def test_statements_are_replaced_with_their_indentation():
    after = planted(Mutant("x", "total", "return sum(values, start=0)", "a = 1\nreturn a"), SOURCE, "total")
    assert after.endswith("def total(values):\n    a = 1\n    return a\n")


def test_three_dots_stand_for_a_body():
    old, new = "for value in values: ...", "for value in values[1:]:\n    ..."
    after = planted(Mutant("x", "Row.total", old, new), SOURCE, "Row.total")
    assert "for value in values[1:]:\n            found += (value\n" in after


def test_parts_are_all_mutants_once():
    parts = [mutant for k in range(1, 5) for mutant in chosen([], f"{k}/4")]
    assert sorted(mutant.name for mutant in parts) == sorted(mutant.name for mutant in MUTANTS)
    assert chosen([MUTANTS[0].name], "1/1") == [MUTANTS[0]]


def test_each_test_function_that_executes_a_line_is_run_before_its_other_parameters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    executed = Executed(tmp_path, ROOT)
    executed._seconds = {
        "a.py::f[1]": 1.0,
        "a.py::f[2]": 2.0,
        "b.py::g[1]": 3.0,
        "b.py::h": MOST_SECONDS,
        "b.py::i": 0.5,
    }
    lines = [(7, test) for test in executed._seconds if test != "b.py::i"] + [(8, "b.py::i")]
    monkeypatch.setattr(executed, "_contexts", lambda file: iter(lines))
    assert executed.tests("x.py", {7}) == ["a.py::f[1]", "b.py::g[1]"]
    executed._seconds["b.py::h"] = 4.0
    assert executed.tests("x.py", {7}) == ["a.py::f[1]", "b.py::g[1]", "b.py::h", "a.py::f[2]"]
    assert executed.tests("x.py", {9})[0] == "b.py::i"
    executed._n_files["b.py::i"] = 1
    assert executed.tests("x.py", {9})[0] == "a.py::f[1]"
    assert executed.seconds_of_files == {"a.py": 3.0, "b.py": 7.5}


def test_tests_near_a_module_are_in_files_that_name_it_or_listed(tmp_path: Path):
    """The file of the module's name is first, then the shortest. `test_mutants.py` would catch every bug."""
    tests = {
        "unit/test_long.py": "import kernels.cpu.products.tile",
        "unit/test_short.py": "from kernels.cpu.products import tile",
        "unit/test_other.py": "from kernels.cpu.formats import rows",
        "golden/test_tile.py": "import kernels.cpu.products.tile",
        "test_mutants.py": "import kernels.cpu.products.tile",
    }
    for name, text in tests.items():
        path = tmp_path / "tests" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    seconds = {"tests/unit/test_long.py": 9.0, "tests/unit/test_short.py": 1.0, "tests/golden/test_tile.py": 99.0}
    naming, *listed = near(tmp_path, "kernels/cpu/products/tile.py", seconds)
    assert naming == ["tests/golden/test_tile.py", "tests/unit/test_short.py", "tests/unit/test_long.py"]
    assert listed[0] == ["tests/unit/test_cpu_gemm.py"]
    assert listed[1] == ["tests/contract/test_ops.py", "-k", "project_add or norm_gate_up or norm_up or norm_head"]
    assert near(tmp_path, "mlx_engine/errors.py", {}) == []


@each("start", LISTED)
def test_listed_files_exist(start: str):
    assert list(ROOT.glob(f"{start}*"))
    assert [run for run in LISTED[start] if not (ROOT / run.split()[0]).exists()] == []
