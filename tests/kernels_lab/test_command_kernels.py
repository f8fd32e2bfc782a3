"""`kernels` as a user meets it."""

import json
import re
from dataclasses import replace
from types import SimpleNamespace

import mlx.core as mx
import pytest
from typer.testing import CliRunner

from kernels.lab import catalog, ladder
from kernels.lab.catalog import Entry
from kernels.lab.ladder import Product
from kernels.launch import use
from mlx_engine.bench import kernel_report, samples
from mlx_engine.commands import app
from tests.kernels_lab.toys import SMALL

ON_GPU = mx.metal.is_available() or mx.cuda.is_available()


def run(*args, code=0):
    result = CliRunner().invoke(app, ["kernels", *map(str, args)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return SimpleNamespace(out=result.stdout, err=result.stderr)


def mistake(*args):
    result = run(*args, code=2)
    assert result.out == ""
    (line,) = result.err.splitlines()
    return line


@pytest.fixture
def few(monkeypatch):
    """Only some of the shapes."""
    every = Entry.cases
    monkeypatch.setattr(Entry, "cases", lambda self: every(self)[:3])


@pytest.fixture
def small(monkeypatch):
    """A model of few numbers."""
    monkeypatch.setattr(ladder, "products", lambda **sizes: SMALL if sizes["vocab_size"] else [])


def test_list_shows_every_kernel_and_where_they_run():
    out = run("list").out
    assert "matvec (rung 3): several rows per SIMD-group" in out
    assert "    x, wq, ws -> y\n    K a multiple of 32, any number of vectors" in out
    assert "emulator  yes" in out
    found = json.loads(run("list", "--json").out)
    assert [kernel["name"] for kernel in found["kernels"]] == [entry.name for entry in catalog.entries()]
    assert set(found["executors"]) == {"metal", "cuda", "emulator"}


def test_check_prints_a_table_and_what_was_run(few):
    out = run("check", "-k", "dequantize", "-k", "thread_per_output", "-e", "emulator").out
    head, first, second, _, last = out.splitlines()
    assert head.split() == ["kernel", "shapes", "runs", "worst", "bound", "in", "units", "of", "seconds"]
    assert first.split()[:5] == ["dequantize", "3", "9", "0.00", "0"]
    assert second.split()[0] == "thread_per_output"
    assert second.endswith("ok")
    assert last.startswith("2 kernels, 6 shapes, 18 runs on emulator: ")


def test_check_fails_with_1_and_says_where(few, monkeypatch):
    def cases(self):
        every = self.original()
        kernel = every[0].launch.kernel
        wrong = replace(kernel, source=kernel.source.replace("fma(d,", "fma(-d,").replace("float(ws", "-float(ws"))
        return [replace(case, launch=replace(case.launch, kernel=wrong)) for case in every]

    monkeypatch.setattr(Entry, "original", Entry.cases, raising=False)
    monkeypatch.setattr(Entry, "cases", cases)
    out = run("check", "-k", "thread_per_output", "-e", "emulator", code=1).out
    assert "3 shapes WRONG" in out
    assert "smallest: 1 x 32, 1 x float32" in out
    found = json.loads(run("check", "-k", "thread_per_output", "-e", "emulator", "--json", code=1).out)
    assert found["passed"] is False
    assert found["kernels"][0]["failures"][0]["text"].startswith("y[0, 0]: expected")


def test_mistakes_are_one_line_and_exit_2(tmp_path):
    assert "no kernel 'nothing'; choose thread_per_output" in mistake("check", "-k", "nothing")
    assert "no executor 'vulkan'; choose metal, cuda or emulator" in mistake("check", "-e", "vulkan")
    assert "--body cannot be combined with --cuda" in mistake("source", "matvec", "--body", "--cuda")
    assert "FILE needs --report" in mistake("bench", tmp_path / "report.md")


@pytest.mark.skipif(ON_GPU, reason="there is a GPU here")
def test_without_a_gpu_bench_refuses_unless_asked_for_counts():
    assert "the emulator cannot predict a GPU's times; --executor emulator counts operations" in mistake("bench")
    assert "MLX finds no Metal GPU" in mistake("check", "-e", "metal")


def test_a_machine_without_any_executor_is_told_what_each_needs(monkeypatch):
    reasons = {"metal": "no GPU", "cuda": "no CUDA", "emulator": "no clang"}
    monkeypatch.setattr("kernels.launch.executors", lambda: reasons)
    said = mistake("bench")
    assert "no executor works here: metal: no GPU; cuda: " in said
    assert "cuda: no CUDA; emulator: no clang" in said


def test_source_shows_the_text():
    assert "[[kernel]] void custom_kernel_matvec" in run("source", "matvec").out
    body = run("source", "matvec", "--body").out
    assert body == catalog.entry("matvec").kernel.source
    assert "__shared__ float parts" in run("source", "matvec", "--cuda").out


def test_bench_counts_in_the_emulator(small):
    found = json.loads(run("bench", "-m", "builtin", "-e", "emulator", "--vectors", "2", "--json").out)
    assert found["executor"] == "emulator"
    assert len(found["ladder"]) == 5 * 4
    assert "tokens" not in found


@pytest.mark.slow
def test_the_report_is_one_file_with_everything(small, tmp_path, monkeypatch):
    monkeypatch.setattr(kernel_report, "TESTS", (samples.Test(n_prompt=4), samples.Test(n_gen=2)))
    monkeypatch.setattr(kernel_report, "REPETITIONS", 1)
    path = tmp_path / "report.md"
    result = run("bench", "--report", path, "-m", "builtin", "-e", "emulator", "--vectors", 2)
    assert str(path) in result.err
    text = path.read_text()
    assert text.startswith("# Kernels on ")
    assert result.out.strip() in text
    found = json.loads(text.split("```json\n")[1].split("\n```")[0])
    assert {row["backend"] for row in found["tokens"]} == {"mlx", "metal"}
    assert {row["test"] for row in found["tokens"]} == {"pp4", "tg2"}
    assert found["model"] == "builtin"
    assert "commit" in found
    assert "mlx" in found["versions"]
    assert str(tmp_path) not in text
    prompts = [(row["product"], row["kernel"]) for row in found["prompts"]]
    assert prompts == [(one.title, way) for one in SMALL[:4] for way in ("prompt_product", "prompt_product_tensors")]
    assert all(row["counts"]["barriers"] for row in found["prompts"])
    assert (found["attention"], found["accelerators"]) == ([], False)
    path = tmp_path / "report.json"
    run("bench", "--report", path, "-m", "builtin", "-e", "emulator", "--vectors", 2)
    assert json.loads(path.read_text())["ladder"] == found["ladder"]


def test_a_report_that_cannot_be_written_is_refused_first(tmp_path):
    result = run("bench", "--report", tmp_path / "no" / "report.md", "-e", "emulator", code=1)
    assert "cannot be written" in result.err


def test_a_page_of_rates():
    """As on a Mac; the numbers are made up."""
    row = {"product": "q+k+v", "rows": [4, 2, 2], "columns": 64, "kernel": "matvec", "R": 4, "NSG": 2, "KS": 1}
    found = {"executor": "metal", "read_gbs": 250.0, "nominal_gbs": 273.0}
    found["ladder"] = [
        row | {"seconds": 2e-5, "gbs": 200.0},
        row | {"kernel": "mx.quantized_matmul", "seconds": 4e-5, "gbs": 100.0},
    ]
    text = kernel_report.summary(found)
    assert "20.0 | 200.0 |       80% |" in text
    assert "A plain read reaches 250.0 GB/s here; 273 GB/s nominal." in text
    prompt = row | {"type": "Q6_K", "activations": "bfloat16", "vectors": 512, "kernel": "prompt_product"}
    found["accelerators"] = False
    found["prompts"] = [
        prompt | {"seconds": 1e-4, "tflops": 2.5},
        prompt | {"kernel": "prompt_product_tensors", "refused": "no such header"},
    ]
    found["attention"] = [{"kernel": "attention", "activations": "float32", "seconds": 3e-4}]
    text = kernel_report.summary(found)
    assert "accelerators for `matmul2d`. Products and attention of a prompt of 512 tokens:" in text
    assert re.search(r"prompt_product \| *Q6_K \| *bfloat16 \| *100.0 \| *2.50 \|", text)
    assert re.search(r"prompt_product_tensors .*refused \| *- \|", text)
    assert re.search(r"attention \| *float32 \| *300.0 \|", text)


def test_a_prompt_is_measured_by_every_kernel_and_by_mlx(monkeypatch):
    """On the CPU, with made-up times: what is called, and what a refusal becomes."""
    monkeypatch.setattr(ladder, "cold_inputs", lambda inputs: [inputs])
    monkeypatch.setattr(ladder, "seconds_per_launch", timed)
    monkeypatch.setattr(ladder, "seconds_per_call", lambda calls: (mx.eval(calls[0]()), 1e-3)[1])
    monkeypatch.setattr(ladder, "PROMPT", 40)
    found = list(ladder.climb_prompts([Product("o", (9,), 256), Product("head", (9,), 256)], "metal"))
    assert [(row["kernel"], row["activations"]) for row in found if row["type"] == "Q6_K"] == [
        (kernel, dtype) for dtype in ("float16", "bfloat16") for kernel in ("prompt_product", "prompt_product_tensors")
    ]
    of_mlx = [row for row in found if row["kernel"] == ladder.STOCK]
    assert [row["tflops"] for row in of_mlx] == [pytest.approx(2e-12 * 9 * 256 * 40 / 1e-3)] * 4
    assert {row["kernel"]: row.get("refused") for row in found} == {
        "prompt_product": None, "prompt_product_tensors": "no such header", ladder.STOCK: None,
    }  # fmt: skip
    heads = {"n_heads": 4, "n_kv_heads": 2, "head_dim": 32}
    with use("emulator"):
        attention = [(row["kernel"], row["activations"]) for row in ladder.climb_attention(**heads, executor="metal")]
    assert attention == [(ladder.ATTENTION, dtype) for dtype in ("float16", "bfloat16", "float32")] + [
        ("attention", "float32")
    ]


def timed(launch, sets, executor):
    if launch.kernel.name == "prompt_product_tensors":
        raise RuntimeError("no such header\nline 2")
    return 1e-3
