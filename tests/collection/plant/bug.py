"""A planted bug: a small edit of a sound kernel, or of its call."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Swap(NamedTuple):
    """A match of a regular expression, counted from 0, and what replaces it."""

    old: str
    new: str = ""
    n: int = 0


@dataclass(frozen=True)
class Bug:
    """See the module.

    Attributes:
        kernel: words of the subject's name, all of which it has; see `subjects`.
        kind: one of about twenty kinds.
        name: what is wrong.
        swaps: what is replaced in the kernel's text, in this order.
        header: whether they are in the header of a kernel of mx.fast.metal_kernel.
        file: of a kernel of a .metal file, the file of the checkout that is edited, if it is not that one.
        after: a regular expression: only what follows its first match is edited.
        call: other arguments of the launch, by name.
        note: the kind of the note that says it, for what may be meant: it is no error.
    """

    kernel: str
    kind: str
    name: str
    swaps: tuple[Swap, ...] = ()
    header: bool = False
    file: str = ""
    after: str = ""
    call: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""

    def edited(self, text: str) -> str:
        """Return the text with the bug.

        Raises:
            ValueError: the text has nothing that a swap replaces.
        """
        start = re.search(self.after, text)
        if start is None:
            raise ValueError(f"{self.kernel}, {self.name}: expected text that matches {self.after!r}, found none")
        head, text = text[: start.end()], text[start.end() :]
        for old, new, n in self.swaps:
            found = list(re.finditer(old, text))
            if len(found) <= n:
                raise ValueError(f"{self.kernel}, {self.name}: expected {n + 1} matches of {old!r}, found {len(found)}")
            text = text[: found[n].start()] + new + text[found[n].end() :]
        return head + text
