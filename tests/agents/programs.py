"""The agent programs: how each is installed, configured for a local server, and asked to run one command."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

MODEL = "test-model"
PROMPT = "Run the echo tool and say what it said."
# A tool for programs that have none.
ECHO = 'def echo(command: str) -> str:\n    "Run the command echo."\n    return command.removeprefix("echo ")'
CHAT, RESPONSES, MESSAGES = "chat", "responses", "messages"


@dataclass(frozen=True)
class Program:
    """An agent.

    Attributes:
        packages: what npm or pip installs.
        command: the file to run in the folder of the packages.
        arguments: its arguments, from the server's address.
        api: the API that it speaks.
        version: prints its version.
        files: the texts of its configuration by their path in the home folder, from the server's address.
        env: further variables of its environment, from the server's address.
        before: arguments of a first run, which configures it.
        uses_tools: whether it has a shell tool; one without only prints the answer.
        python: the oldest Python that it runs on; None for a program of npm.
    """

    packages: tuple[str, ...]
    command: str
    arguments: Callable[[str], Sequence[str]]
    api: str = CHAT
    version: tuple[str, ...] = ("--version",)
    files: Callable[[str], Mapping[str, str]] = lambda url: {}
    env: Callable[[str], Mapping[str, str]] = lambda url: {}
    before: Callable[[str], Sequence[str]] | None = None
    uses_tools: bool = True
    python: tuple[int, int] | None = None


def _opencode(url: str) -> Mapping[str, str]:
    options = {"baseURL": f"{url}/v1", "apiKey": "none"}
    limit = {"context": 40_960, "output": 8192}
    provider = {"npm": "@ai-sdk/openai-compatible", "name": "local", "options": options}
    models = {MODEL: {"name": MODEL, "tool_call": True, "limit": limit}}
    config = {
        "$schema": "https://opencode.ai/config.json",
        "provider": {"local": {**provider, "models": models}},
        "model": f"local/{MODEL}",
        "small_model": f"local/{MODEL}",
        "permission": {"bash": "allow"},
    }
    return {".config/opencode/opencode.json": json.dumps(config)}


def _pi(url: str) -> Mapping[str, str]:
    model = {"id": MODEL, "contextWindow": 40_960, "maxTokens": 8192, "reasoning": True}
    provider = {"baseUrl": f"{url}/v1", "api": "openai-completions", "apiKey": "none", "models": [model]}
    return {".pi/agent/models.json": json.dumps({"providers": {"local": provider}})}


def _codex(url: str) -> Mapping[str, str]:
    text = f'model = "{MODEL}"\nmodel_provider = "local"\n[model_providers.local]\nname = "local"\n'
    # A stream must have an event every 8 seconds, however long the prompt is.
    waits = "stream_idle_timeout_ms = 8000\nstream_max_retries = 0\nrequest_max_retries = 0\n"
    return {".codex/config.toml": f'{text}base_url = "{url}/v1"\nwire_api = "responses"\n{waits}'}


def _continue(url: str) -> Mapping[str, str]:
    model = f"  - name: {MODEL}\n    provider: openai\n    model: {MODEL}\n    apiBase: {url}/v1\n    apiKey: none\n"
    head = "name: test\nversion: 0.0.1\nschema: v1\nmodels:\n"
    return {".continue/config.yaml": f"{head}{model}    roles: [chat]\n    capabilities: [tool_use]\n"}


def _vibe(url: str) -> Mapping[str, str]:
    provider = f'[[providers]]\nname = "local"\napi_base = "{url}/v1"\napi_key_env_var = ""\n'
    model = f'[[models]]\nname = "{MODEL}"\nprovider = "local"\nalias = "local"\n'
    return {".vibe/config.toml": f'active_model = "local"\nenable_telemetry = false\n{provider}{model}'}


def _llm(url: str) -> Mapping[str, str]:
    model = f"- model_id: {MODEL}\n  model_name: {MODEL}\n  api_base: {url}/v1\n"
    return {"llm/extra-openai-models.yaml": f"{model}  supports_tools: true\n"}


def _claude_code(url: str) -> Mapping[str, str]:
    kinds = ("HAIKU", "SONNET", "OPUS")
    models = {f"ANTHROPIC_DEFAULT_{kind}_MODEL": MODEL for kind in kinds} | {"CLAUDE_CODE_SUBAGENT_MODEL": MODEL}
    quiet = {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1"}
    return {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_AUTH_TOKEN": "none", "ANTHROPIC_MODEL": MODEL, **models, **quiet}


def _openai(url: str) -> Mapping[str, str]:
    address = {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_BASE": f"{url}/v1"}
    return {**address, "OPENAI_API_KEY": "none", "OPENAI_MODEL": MODEL}


PROGRAMS = {
    "claude-code": Program(
        ("@anthropic-ai/claude-code",),
        "node_modules/.bin/claude",
        lambda url: ["-p", PROMPT, "--allowedTools", "Bash", "--output-format", "json"],
        MESSAGES,
        env=_claude_code,
    ),
    "codex": Program(
        ("@openai/codex",),
        "node_modules/.bin/codex",
        lambda url: ["exec", "--skip-git-repo-check", "--sandbox", "read-only", PROMPT],
        RESPONSES,
        files=_codex,
    ),
    "opencode": Program(
        ("opencode-ai",),
        "node_modules/.bin/opencode",
        lambda url: ["run", "-m", f"local/{MODEL}", PROMPT],
        files=_opencode,
        env=lambda url: {"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1"},
    ),
    "pi": Program(
        ("@mariozechner/pi-coding-agent",),
        "node_modules/.bin/pi",
        lambda url: ["--provider", "local", "--model", MODEL, "-p", PROMPT],
        files=_pi,
    ),
    "cline": Program(
        ("cline",),
        "node_modules/.bin/cline",
        lambda url: ["--yolo", PROMPT],
        before=lambda url: ["auth", "-p", "openai-compatible", "-k", "none", "-m", MODEL, "-b", f"{url}/v1"],
    ),
    "continue": Program(
        ("@continuedev/cli",),
        "node_modules/.bin/cn",
        lambda url: ["--config", ".continue/config.yaml", "--auto", "-p", PROMPT],
        files=_continue,
    ),
    "vibe": Program(
        ("mistral-vibe",),
        "bin/vibe",
        lambda url: ["-p", PROMPT, "--auto-approve"],
        files=_vibe,
        python=(3, 12),
    ),
    "aider": Program(
        ("aider-chat",),
        "bin/aider",
        lambda url: [
            *("--model", f"openai/{MODEL}", "--no-show-model-warnings", "--no-check-update", "--analytics-disable"),
            *("--yes-always", "--no-git", "--message", "Greet the user.", "hello.txt"),
        ],
        env=_openai,
        uses_tools=False,
        python=(3, 10),
    ),
    "llm": Program(
        ("llm",),
        "bin/llm",
        lambda url: ["-m", MODEL, "--functions", ECHO, PROMPT],
        files=_llm,
        env=lambda url: {"LLM_USER_PATH": "llm", "OPENAI_API_KEY": "none"},
        python=(3, 10),
    ),
    "gptme": Program(
        ("gptme",),
        "bin/gptme",
        lambda url: ["-n", "-m", f"local/{MODEL}", "--tool-format", "tool", PROMPT],
        env=_openai,
        python=(3, 10),
    ),
    "qwen-code": Program(
        ("@qwen-code/qwen-code",),
        "node_modules/.bin/qwen",
        lambda url: ["--auth-type", "openai", "-y", "-p", PROMPT],
        # It asks for 32,000 tokens otherwise, which must fit beside the prompt.
        env=lambda url: {**_openai(url), "QWEN_CODE_MAX_OUTPUT_TOKENS": "8192"},
    ),
}
# The packages of Python that `sdks/use_NAME.py` uses, in an environment of its own.
SDKS = {
    "openai": "openai",
    "anthropic": "anthropic",
    "agents": "openai-agents",
    "pydantic_ai": "pydantic-ai-slim[openai,anthropic]",
    "smolagents": "smolagents[openai]",
    "langchain": "langchain langchain-openai langchain-anthropic",
    "instructor": "instructor anthropic",
}
# What is run if no names are given; the others are small, slow, or did not end every time.
USUAL = ("claude-code", "codex", "opencode", "pi", "cline", "continue", "vibe")


def install(name: str, folder: Path) -> Path:
    """Return the folder of a program's packages; install their newest versions if they are not there."""
    program, home = PROGRAMS[name], folder / name
    if (home / program.command).exists():
        return home
    home.mkdir(parents=True, exist_ok=True)
    if program.python is None:
        (home / "package.json").write_text('{"private": true}')
        _run([_found("npm"), "install", "--no-audit", "--no-fund", *program.packages], home)
    else:
        environment(home, program.packages, program.python)
    return home


def environment(home: Path, packages: Sequence[str], oldest: tuple[int, int] = (3, 10)) -> Path:
    """Return the Python of a virtual environment with packages, which is made if it is not there."""
    program = home / "bin" / "python"
    if not program.exists():
        newer = (f"python{major}.{minor}" for major, minor in ((3, 12), (3, 13), (3, 14)) if (major, minor) >= oldest)
        fits = sys.version_info >= oldest
        python = sys.executable if fits else next((found for name in newer if (found := shutil.which(name))), None)
        if python is None:
            raise RuntimeError(f"{home.name}: expected Python {'.'.join(map(str, oldest))} or newer on the path")
        _run([python, "-m", "venv", str(home)], home.parent)
        uv = shutil.which("uv")  # pip took 20 minutes to resolve some of these
        how = [uv, "pip", "install", "--python", str(program)] if uv else [str(program), "-m", "pip", "install"]
        _run([*how, "-q", *packages], home)
    return program


def _found(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        raise RuntimeError(f"{name}: expected a program of this name, found none; install it, or name other agents")
    return path


def _run(command: Sequence[str], folder: Path) -> None:
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=1800, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: status {done.returncode}\n{done.stdout}{done.stderr}")
