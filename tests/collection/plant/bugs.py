"""All planted bugs."""

from __future__ import annotations

from tests.collection.plant import bugs_of_memory, bugs_of_order, bugs_of_values

BUGS = [*bugs_of_order.BUGS, *bugs_of_memory.BUGS, *bugs_of_values.BUGS]
