"""The list of kernels is complete, and a check of any of them can fail."""

from dataclasses import replace

import pytest

from kernels.emulator.compiler import QUICK
from kernels.kernel import METAL
from kernels.lab.catalog import Entry, check_entries, entries, entry
from kernels.lab.check import Orders, check_cases
from kernels.lab.run import BUILDS, UNOPTIMIZED_BUILDS

NAMES = [one.name for one in entries()]


def test_every_kernel_is_listed():
    # Both kernels of prompts are in one file.
    files = {name.removesuffix("_tensors") for name in NAMES}
    assert files == {path.stem for path in METAL.glob("*.metal") if not path.stem.endswith(".h")}
    with pytest.raises(KeyError):
        entry("nothing")


def test_the_ladder_comes_first():
    rungs = [one.rung for one in entries()]
    assert rungs[:4] == [1, 2, 3, 4]
    assert set(rungs[4:]) == {None}


@pytest.mark.parametrize("name", NAMES)
def test_there_are_enough_shapes(name):
    one = entry(name)
    assert one.n_cases >= 24
    assert one.summary
    assert "\n" not in one.summary


def test_a_planted_mistake_is_reported():
    one = entry("matvec")
    case = one.cases()[2]
    kernel = replace(case.launch.kernel, source=case.launch.kernel.source.replace("y[size_t", "if (row != 1) y[size_t"))
    assert kernel.source != case.launch.kernel.source
    wrong = replace(case, launch=replace(case.launch, kernel=kernel))
    assert check_cases("matvec", [case], "emulator", Orders((0, 1)), bound=2)
    verdict = check_cases("matvec", [wrong], "emulator", Orders((0, 1)), bound=2)
    assert not verdict
    assert "[0, 1]: expected" in str(verdict)


def test_our_kernels_keep_the_rules_of_cuda(monkeypatch):
    one = entry("matvec")
    case = one.cases()[0]
    kernel = replace(case.launch.kernel, source=case.launch.kernel.source + "\n(void)0.5;")
    monkeypatch.setattr(Entry, "cases", lambda self: [replace(case, launch=replace(case.launch, kernel=kernel))])
    (verdict,) = check_entries([one], "emulator", Orders((0, 1)))
    assert "`0.5` has no suffix" in str(verdict)
    given = []
    monkeypatch.setattr("kernels.lab.catalog.check_cases", lambda *args, **_: given.append(args[3]) or verdict)
    check_entries([one], "emulator", Orders((0,)))
    assert given == [Orders((0,), lanes="all", suffixes=True)]


def test_the_builds_without_optimisation_make_all_checks():
    left_out = set(BUILDS) - set(UNOPTIMIZED_BUILDS)
    assert left_out == {"spaces"}
    assert set(QUICK["spaces"].flags) < set(QUICK["undefined"].flags)


def test_text_is_what_mlx_would_compile():
    text = entry("thread_per_output").metal_text()
    assert "[[kernel]] void custom_kernel_thread_per_output" in text
    assert entry("thread_per_output").kernel.source.strip() in text
    cuda = entry("matvec").cuda_text()
    assert "__shared__" in cuda
    assert "threadgroup float" not in cuda
