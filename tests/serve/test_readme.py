"""The examples of docs/server.md, run against a server."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mlx_engine.commands import app
from tests.patience import PATIENCE
from tests.serve.served import HTTP, Served, events, served

SECTION = (Path(__file__).parents[2] / "docs" / "server.md").read_text(encoding="utf-8")
ADDRESS = "http://127.0.0.1:8080"


@pytest.fixture(scope="module")
def builtin() -> Iterator[Served]:
    with served(model="builtin") as found:
        yield found


def blocks(language: str, server: Served) -> list[str]:
    found = re.findall(rf"```{language}\n(.*?)\n```", SECTION, flags=re.DOTALL)
    assert found
    return [text.replace(ADDRESS, server.url) for text in found]


def test_the_options_exist():
    shown = CliRunner().invoke(app, ["serve", "--help-all"], env={"COLUMNS": "200"}).stdout
    flags = set(re.findall(r"--[a-z-]+", SECTION))
    assert len(flags) > 5
    assert [flag for flag in flags if flag not in shown] == []


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_curl(builtin: Served):
    lines = [line for block in blocks("sh", builtin) for line in block.splitlines() if line.startswith("curl ")]
    reply, stream, scored, ranked, vectors, ranking, response, message, count = (
        subprocess.run([*shlex.split(line), "-sS"], capture_output=True, check=True, timeout=PATIENCE).stdout
        for line in lines
    )
    assert json.loads(reply)["usage"]["completion_tokens"] <= 40
    assert events(stream)[-1] == "[DONE]"
    assert json.loads(scored)["choices"][0]["logprobs"]["token_logprobs"][0] is None
    assert json.loads(ranked)["choices"][0]["prompt_logprobs"][0] is None
    assert len(json.loads(vectors)["data"]) == 2
    assert json.loads(ranking)["error"]["code"] == "unsupported_by_model"  # the built-in model is no reranker
    assert json.loads(response)["object"] == "response"
    n_prompt = json.loads(message)["usage"]["input_tokens"] + json.loads(message)["usage"]["cache_read_input_tokens"]
    assert json.loads(count)["input_tokens"] == n_prompt


def test_python(builtin: Served):
    pytest.importorskip("openai")
    (source,) = blocks("python", builtin)
    run = subprocess.run([sys.executable, "-c", source], capture_output=True, check=True, timeout=PATIENCE)
    assert run.stdout  # a sampled answer, which may be short


def test_editor(builtin: Served):
    settings: dict[str, Any] = json.loads(blocks("json", builtin)[0])
    provider = settings["language_models"]["openai_compatible"]["mlx_engine"]
    listed = HTTP.get(provider["api_url"] + "/models").json()["data"]
    assert [model["name"] for model in provider["available_models"]] == [model["id"] for model in listed]
