"""placeholder until the branch is merged."""

from typing import Any

TokenLogprobs = Any
