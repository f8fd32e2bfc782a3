"""`python cli.py serve` as a process: what it prints works, and how it ends."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import httpx
import psutil
import pytest
from click.testing import Result
from typer.testing import CliRunner

from mlx_engine.commands import app, serve
from mlx_engine.commands.serve import AddressOptions, CapacityOptions, served_name
from mlx_engine.commands.values import bytes_of
from mlx_engine.errors import OptionError
from tests.builtin import LONGEST
from tests.patience import PATIENCE
from tests.serve.served import HTTP

ROOT = Path(__file__).parents[2]


@contextmanager
def process(*arguments: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """Run the command with a free port, and return what it has printed until it listens."""
    command = [sys.executable, str(ROOT / "cli.py"), "serve", "--port", "0", *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment}) as run:
        assert run.stderr is not None
        lines = []
        try:
            for line in run.stderr:
                lines.append(line.rstrip("\n"))
                if line.startswith("Try: "):
                    break
            yield run, lines
        finally:
            run.kill()


def test_what_it_prints_works_and_a_signal_ends_it():
    with process("--slots", "2", MLX_ENGINE_API_KEY="secret") as (run, lines):
        text = "\n".join(lines)
        assert re.search(rf"Keys and values: {2 * LONGEST:,} tokens in [\d.]+ MiB, shared by 2 slots", text)
        url = re.search(r"Listening on (\S+)", text)
        assert url is not None
        assert HTTP.get(url[1] + "/health").json() == {"status": "ok"}
        assert f"Chat in a browser: {url[1]}/ (the page asks for the key)" in lines
        assert "<html" in HTTP.get(url[1] + "/").text
        assert "fused" not in text  # no news for a user
        words = shlex.split(lines[-1].removeprefix("Try: ").replace("Bearer KEY", "Bearer secret"))
        assert words[0] == "curl"
        if shutil.which("curl"):
            reply = json.loads(subprocess.run([*words, "-s"], capture_output=True, check=True, timeout=PATIENCE).stdout)
            assert reply["model"] == "builtin"
            assert reply["choices"][0]["message"]["content"]
        assert HTTP.post(words[1], json={}).status_code == 401
        assert HTTP.get(url[1], headers={"Host": "evil.example"}).status_code == 403
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 150, "ignore_eos": True, "stream": True}
        headers = {"Authorization": "Bearer secret"}
        with HTTP.stream("POST", words[1], json=body, headers=headers, timeout=PATIENCE) as response:
            pieces = response.iter_raw()
            first = next(pieces)
            run.send_signal(signal.SIGTERM)
            rest = b"".join(pieces)
        assert (first + rest).endswith(b"data: [DONE]\n\n")
        assert run.wait(PATIENCE) == 0


@pytest.mark.slow
def test_requests_leave_no_garbage():
    """An error and its traceback refer to each other: 13 KB of each request, until garbage is collected."""
    with process("--slots", "1") as (run, lines), httpx.Client(timeout=PATIENCE) as client:
        url = lines[-1].split()[2].replace("/chat/", "/")
        resident = []
        for _ in range(2):
            assert {client.post(url, json={}).status_code for _ in range(160)} == {400}
            resident.append(psutil.Process(run.pid).memory_info().rss)
        assert resident[1] - resident[0] < 1 << 20


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["serve", *arguments])


def test_a_smaller_context_takes_less_memory(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(serve, "collect_garbage_again", lambda: None)  # it is for a process of its own
    capacity = CapacityOptions(slots=2, context_len=128)
    _, scheduler = serve.Loading("simd", capacity, {}).open("builtin").load()
    assert scheduler.pool.n_tokens == 256
    assert f"context is {LONGEST:,} tokens; a request may have at most 128" in capsys.readouterr().err
    given = CapacityOptions(slots=2, context_len=128, kv_memory="3MB")
    assert serve.Loading("simd", given, {}).open("builtin").load()[1].pool.n_tokens > 256
    service = serve.new_service(MagicMock(), serve.ModelSpec("x", "builtin"), AddressOptions(), capacity, "127.0.0.1")
    assert service.context_len == 128
    assert not service.explains_cache
    assert service.hosts == {"localhost", "127.0.0.1", "::1"}
    assert scheduler.prefix is not None
    assert scheduler.prefix.whole_pages


@pytest.mark.parametrize(
    ("host", "bound", "url", "others"),
    [
        ("localhost", ("127.0.0.1", 80), "http://127.0.0.1:80", ""),
        ("::1", ("::1", 80, 0, 0), "http://[::1]:80", ""),
        ("192.0.2.1", ("192.0.2.1", 80), "http://192.0.2.1:80", ""),
        ("0.0.0.0", ("0.0.0.0", 80), "http://127.0.0.1:80", " (elsewhere, with this machine's name or address)"),
        ("::", ("::", 80, 0, 0), "http://[::1]:80", " (elsewhere, with this machine's name or address)"),
    ],
)
def test_the_address_of_the_page_is_printed(host: str, bound: tuple[Any, ...], url: str, others: str):
    address = AddressOptions(host=host)
    assert address.url(MagicMock(getsockname=lambda: bound)) == url
    assert serve.usage(None, address, url)[1] == f"Chat in a browser: {url}/{others}"


def test_wrong_options_are_refused_before_anything_is_loaded():
    for arguments, text in [
        (["--kv-memory", "much"], "--kv-memory must be a size such as 2GiB, 500MB or 1000000, not 'much'"),
        (["--max-body", "-1"], "--max-body"),
        (["--api-key", ""], "--api-key must be printable ASCII"),
        (["--api-key", " secret"], "not empty and without spaces at its ends"),
        (["--api-key", "secret "], "--api-key must be printable ASCII"),
        (["--allow-host", "http://box"], "--allow-host must be a host name or an IP address"),
        (["--api-key", "schlüssel"], "--api-key must be printable ASCII"),
        (["--host", "256.0.0.1", "--port", "0"], "cannot listen on 256.0.0.1:0"),
    ]:
        result = invoke(*arguments)
        assert result.exit_code == 2
        assert text in result.stderr
        assert "Model:" not in result.stderr


def test_a_model_that_cannot_be_loaded_ends_the_server(tmp_path: Path):
    result = invoke("--port", "0", "-m", str(tmp_path / "none.gguf"))
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert "none.gguf" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("2GiB", 2 << 30), ("2G", 2 << 30), ("2gb", 2 * 10**9), ("1.5KiB", 1536), ("77", 77), ("7B", 7)],
)
def test_sizes(text: str, nbytes: int):
    assert bytes_of("--x", text) == nbytes


def test_a_size_has_a_number():
    with pytest.raises(OptionError, match="--x must be a size"):
        bytes_of("--x", "GiB")


def test_the_served_name(tmp_path: Path):
    assert served_name("builtin") == "builtin"
    assert served_name("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"
    assert served_name("/models/Qwen3-0.6B-Q8_0.gguf") == "Qwen3-0.6B-Q8_0"
    assert served_name(str(tmp_path)) == tmp_path.name
    assert served_name(str(tmp_path / "gone")) == "gone"
    assert served_name(".") == Path.cwd().name


def test_a_warning_when_anyone_may_use_it():
    (warning,) = AddressOptions(host="0.0.0.0").warnings("0.0.0.0")
    assert "web pages" in warning
    (warning,) = AddressOptions(host="0.0.0.0", allow_host=["box"]).warnings("0.0.0.0")
    assert "web pages" not in warning
    assert AddressOptions(host="0.0.0.0", api_key="x").warnings("0.0.0.0") == []
    assert AddressOptions(host="localhost").warnings("127.0.0.1") == []
    assert AddressOptions(host="::1").warnings("::1") == []
