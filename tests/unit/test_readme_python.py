"""The examples in Python of README and docs/python.md, run in their order with the built-in model."""

import re
from pathlib import Path
from typing import Any

import pytest

from mlx_engine.errors import ChatTemplateError, ClosedError

ROOT = Path(__file__).parents[2]


def test_the_examples_run(capsys):
    text = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    load, tools, several, scores, conversation = (block.replace('"model.gguf"', '"builtin"') for block in blocks)
    names: dict[str, Any] = {}
    exec(load, names)
    with pytest.raises(ChatTemplateError, match="does not read tools"):  # the built-in model has none
        exec(tools.replace(', variables={"enable_thinking": False}', ""), names)
    exec(several, names)
    assert len(capsys.readouterr().out) > 100
    made = [names["first"], names["second"]]
    for found, limit in zip(made, (20, 40), strict=True):
        assert len(found.token_ids) == limit or found.finish_reason == "stop"
    with pytest.raises(ClosedError):
        names["engine"].generate("Once")
    exec(scores, names)
    assert names["vectors"].shape[0] == 2
    assert len(names["scored"][0].top) == 5
    exec(conversation, names)
    assert len(names["conversation"].messages) == 3


def test_the_example_of_the_readme_runs(capsys):
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    exec(block.replace('"model.gguf"', '"builtin"'), {})
    assert len(capsys.readouterr().out) > 100
