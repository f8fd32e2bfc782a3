"""docs/kernels.md says what happens."""

import sys

import pytest

from tests.kernels_lab.page import PAGE, blocks, run

TEXT = PAGE.read_text()


@pytest.mark.skipif(sys.platform == "darwin", reason="lines of faults are read from ELF files, which a Mac has not")
def test_every_block_prints_what_stands_below_it():
    namespace = {}
    for code, printed in blocks(TEXT):
        assert run(code, namespace) == printed


def test_the_page_shows_each_kind_of_mistake():
    printed = "".join(printed for _, printed in blocks(TEXT))
    for words in ("past its end", "takes no part", "the result depends on the order of threads", "all right"):
        assert words in printed
    assert len(blocks(TEXT)) >= 8
