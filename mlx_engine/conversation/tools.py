"""Which tools an answer may or must call, and the constraint that follows from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from mlx_engine.conversation.formats import required_format
from mlx_engine.errors import OptionError

if TYPE_CHECKING:
    from mlx_engine.tokenizer.tokenizer import Tokenizer


class ToolChoice(NamedTuple):
    """Which tools of a prompt an answer calls.

    Attributes:
        is_required: whether it must call one.
        name: the only tool that it may call; None for any.
        is_parallel: whether it may call several.
    """

    is_required: bool = False
    name: str | None = None
    is_parallel: bool = True


def with_choice(
    options: Mapping[str, Any], tokenizer: Tokenizer, tools: Sequence[Mapping[str, Any]], choice: ToolChoice
) -> dict[str, Any]:
    """Return the options of an answer to a prompt with tools.

    Raises:
        OptionError: there are tools, and the model's calls cannot be read, or the choice cannot be a constraint.
    """
    if not tools:
        return dict(options)
    required_format(tokenizer)
    if choice.is_required or choice.name:
        raise OptionError("tool_choice required", option="tool_choice")
    return dict(options)
