"""The code of docs/kernels.md, block by block; `python -m tests.kernels_lab.page` writes below it what it prints."""

import contextlib
import io
import re
from pathlib import Path

import kernels

PAGE = Path(__file__).parents[2] / "docs" / "kernels.md"
# A block of Python, and the block of text behind it, if there is one.
BLOCK = re.compile(r"```python\n(.*?)```\n(?:\n```text\n(.*?)```\n)?", re.DOTALL)


def blocks(text):
    """(code, what it should print) of each."""
    return [(match[1], match[2] or "") for match in BLOCK.finditer(text)]


def run(code, namespace):
    """What it prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), kernels.use("emulator"):
        exec(compile(code, str(PAGE), "exec"), namespace)
    return printed.getvalue()


def rewritten(text):
    """The page with what its blocks print now."""
    namespace = {}

    def block(match):
        printed = run(match[1], namespace)
        return f"```python\n{match[1]}```\n" + (f"\n```text\n{printed}```\n" if printed else "")

    return BLOCK.sub(block, text)


if __name__ == "__main__":
    PAGE.write_text(rewritten(PAGE.read_text()))
