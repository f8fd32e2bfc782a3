"""Names of models on the hub as people paste them: ids with a file or a type, and addresses of pages and files."""

from pathlib import Path

import pytest

from mlx_engine.checkpoint import hub
from mlx_engine.checkpoint.sources import HubName, hub_name, is_cached, resolve
from mlx_engine.commands.serve import served_name
from tests.unit.test_command_generate import MODEL, generate, only_line
from tests.unit.test_command_hub import NETWORK_ERRORS, answering, cache  # noqa: F401 - a fixture

HUB = "https://huggingface.co"

NAMES = [
    ("org/repo", "org/repo", None),
    ("org/repo:a.gguf", "org/repo", "a.gguf"),
    ("org/repo:Q4_K_M", "org/repo", "Q4_K_M"),
    (f"{HUB}/org/repo", "org/repo", None),
    (f"{HUB}/org/repo/", "org/repo", None),
    (f"{HUB}/org/repo/tree/main", "org/repo", None),
    (f"{HUB}/org/repo?show_file_info=a-Q4_0.gguf", "org/repo", "a-Q4_0.gguf"),
    (f"{HUB}/org/repo/resolve/main/a.gguf", "org/repo", "a.gguf"),
    (f"{HUB}/org/repo/resolve/main/a.gguf?download=true", "org/repo", "a.gguf"),
    (f"{HUB}/org/repo/blob/main/Q4%20K/a.GGUF#x", "org/repo", "Q4 K/a.GGUF"),
    (f"{HUB}/org/repo/raw/main/a.gguf", "org/repo", "a.gguf"),
    (f"{HUB}/org/model.gguf", "org/model.gguf", None),
    ("http://www.huggingface.co/org/repo", "org/repo", None),
    ("HTTPS://HuggingFace.co/org/repo", "org/repo", None),
    ("huggingface.co/org/repo", "org/repo", None),
    ("hf.co/org/repo:Q4_K_M", "org/repo", "Q4_K_M"),
]


@pytest.mark.parametrize(("text", "repo", "file"), NAMES, ids=[name[0] for name in NAMES])
def test_a_name_leads_to_a_repository_and_a_file(monkeypatch, text, repo, file):
    monkeypatch.setattr(hub, "download", lambda *name: name)
    monkeypatch.setattr(hub, "is_cached", lambda *name: name)
    assert resolve(text) == is_cached(text) == hub_name(text) == HubName(repo, file)


@pytest.mark.parametrize(
    "text", ["a.gguf", "models/a/b.gguf", "/org/repo", "org/repo:a:b", "ftp://hf.co/a/b", "shape:x"]
)
def test_other_texts_are_no_names(text):
    assert hub_name(text) is None
    assert is_cached(text) is None
    assert is_cached("a\0b") is None


REFUSED = [
    ("https://example.com/org/repo", " example.com is not huggingface.co"),
    ("https://huggingface.co.example.com/org/repo", " huggingface.co.example.com is not huggingface.co"),
    ("https://user@huggingface.co/org/repo", " user@huggingface.co is not huggingface.co"),
    ("https://[huggingface.co/a", "not a valid address"),
    (f"{HUB}", "not the page of a model"),
    (f"{HUB}/gpt2", "not the page of a model"),
    (f"{HUB}/datasets/repo", "not the page of a model"),
    (f"{HUB}/datasets/org/repo/resolve/main/a.gguf", "not the page of a model"),
    (f"{HUB}/org/repo/discussions/3", "not the page of a model"),
    (f"{HUB}/org/repo/blob/v2/a.gguf", "only the branch main is read, not v2"),
    (f"{HUB}/org/repo/resolve/refs%2Fpr%2F1/a.gguf", "only the branch main is read, not refs"),
    (f"{HUB}/org/repo/blob/main/model.safetensors", "for a folder of safetensors give org/repo"),
    (f"{HUB}/org/repo/resolve/main/..%2F../a.gguf", "not the page of a model"),
    (f"{HUB}/org/repo/resolve/main", "not a GGUF file"),
    (f"{HUB}/org/repo/tree/main/sub", "not a GGUF file"),
]


@pytest.mark.some(4)
@pytest.mark.parametrize(("text", "reason"), REFUSED, ids=[text for text, _ in REFUSED])
def test_an_address_of_something_else_is_one_line(monkeypatch, text, reason):
    monkeypatch.setattr(hub, "download", lambda *_: pytest.fail("nothing may be downloaded"))
    result = generate("a", model=text)
    line = only_line(result)
    assert (result.code, line.startswith(f"error: {text}: "), reason in line) == (1, True, True)
    assert is_cached(text) is None


def test_the_mirror_of_this_machine_is_the_hub(monkeypatch):
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "ENDPOINT", "https://mirror.example:8443")
    assert hub_name("https://mirror.example:8443/org/repo") == HubName("org/repo", None)


# ---- types ----

FILES = [
    *("README.md", "config.json", "m-Q4_K_M.gguf", "m-Q4_K_S.gguf", "m-Q8_0.gguf", "m-BF16.gguf", "mmproj-F16.gguf"),
    *("F16/m-F16-00001-of-00002.gguf", "F16/m-F16-00002-of-00002.gguf", "m-UD-Q2_K_XL.gguf", "m.IQ4_XS.gguf"),
]


@pytest.mark.parametrize(
    ("wanted", "file"),
    [
        ("Q4_K_M", "m-Q4_K_M.gguf"), ("q4_k_s", "m-Q4_K_S.gguf"), ("Q8_0", "m-Q8_0.gguf"), ("BF16", "m-BF16.gguf"),
        ("F16", "F16/m-F16-00001-of-00002.gguf"), ("UD-Q2_K_XL", "m-UD-Q2_K_XL.gguf"), ("IQ4_XS", "m.IQ4_XS.gguf"),
        ("other.gguf", "other.gguf"),
    ],
)  # fmt: skip
def test_a_type_is_the_only_file_that_has_it_in_its_name(monkeypatch, wanted, file):
    answering(monkeypatch, FILES)
    monkeypatch.setattr(hub, "_fetch", lambda repo, name, *, offline: (repo, name, offline))
    assert hub.download("org/repo", wanted) == ("org/repo", file, False)


@pytest.mark.parametrize(
    ("wanted", "files", "listed"),
    [
        ("Q4_K", FILES, ["m-Q4_K_M.gguf", "m-BF16.gguf"]),
        ("latest", FILES, ["m-Q8_0.gguf"]),
        ("Q4_0", ["a-Q4_0.gguf", "b-q4_0.gguf", "c-Q8_0.gguf"], ["a-Q4_0.gguf, b-q4_0.gguf"]),
        ("Q4_0", ["config.json", "model.safetensors"], ["this repository has no GGUF files"]),
    ],
    ids=str,
)
def test_a_type_of_no_file_or_of_several_is_one_line(cache, monkeypatch, wanted, files, listed):  # noqa: F811
    answering(monkeypatch, files)
    result = generate("a", model=f"org/repo:{wanted}")
    line = only_line(result)
    assert (result.code, [name for name in listed if name not in line]) == (1, [])
    assert ("c-Q8_0" in line) is False


def test_without_a_network_a_type_is_found_in_the_cache(cache, monkeypatch):  # noqa: F811
    cache.keep("m-f32.gguf", Path(MODEL).read_bytes())
    answering(monkeypatch, NETWORK_ERRORS["dns"]())
    assert is_cached("org/repo:F32") is True
    assert is_cached("org/repo:Q4_0") is False
    assert "network" in only_line(generate("a", model="org/repo:Q4_0"))
    assert generate("a", "-n", 1, "--json", model="hf.co/org/repo:F32").code == 0


def test_the_server_names_an_address_by_its_repository():
    assert served_name(f"{HUB}/org/repo") == "org/repo"
    assert served_name("org/repo:Q4_K_M") == "org/repo:Q4_K_M"
    assert served_name(MODEL) == "model-f32"
