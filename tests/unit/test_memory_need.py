"""The memory that a model needs: found before a weight is read, compared with what is free, and given back."""

import psutil
import pytest

import mlx_engine
from mlx_engine import engine as engine_module
from mlx_engine.backends import create_backend
from mlx_engine.bench import roofline
from mlx_engine.checkpoint.gguf import open_gguf
from mlx_engine.checkpoint.gguf_writer import write_gguf
from mlx_engine.checkpoint.model_files import open_checkpoint
from mlx_engine.errors import NotEnoughMemoryError
from mlx_engine.machine.memory import available_memory, is_view
from mlx_engine.observe import log
from mlx_engine.quant import BY_NAME
from mlx_engine.weights import outline
from mlx_engine.weights import parameters as parameters_module
from mlx_engine.weights.conversion import Conversion
from mlx_engine.weights.model import plan_model
from mlx_engine.weights.outline import Need, expansions, need_of, outlined
from mlx_engine.weights.plan import Tensor
from tests.unit.test_command_generate import DATA, cli, generate, only_line
from tests.unit.test_cores import machine

HF, Q8 = DATA / "hf", DATA / "model-q8_0.gguf"
GIB = 1 << 30
PLENTY = 1 << 50


# ---- what is free ----


def limits(folder, limit, used, stat, names):
    return dict(zip([f"{folder}/{name}" for name in names], [f"{limit}\n", f"{used}\n", stat], strict=True))


V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat")
V2 = ("memory.max", "memory.current", "memory.stat")


@pytest.mark.parametrize(
    ("groups", "files", "want"),
    [
        ("0::/\n", {}, PLENTY),
        ("0::/pod\n", limits("pod", 1000, 400, "anon 300\ninactive_file 50\nactive_file 7\n", V2), 657),
        ("0::/pod/box\n", limits("pod", 1000, 400, "", V2), 600),
        ("0::/pod\n", limits("pod", "max", 400, "", V2), PLENTY),
        ("0::/pod\n", limits("pod", 300, 400, "", V2), 0),
        ("4:memory:/box\n", limits("memory/box", 900, 100, "total_inactive_file 5\ninactive_file 3\n", V1), 805),
        ("4:memory:/box\n", limits("memory", 900, 100, "damaged\n", V1), 800),
        ("4:cpu:/box\n", limits("memory", 900, 100, "", V1), PLENTY),
        ("0::/pod\n", {"pod/memory.max": "1000\n"}, PLENTY),
    ],
)
def test_the_limit_of_a_container_counts(tmp_path, monkeypatch, groups, files, want):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": PLENTY}))
    assert available_memory(machine(tmp_path, groups, files)) == want


def test_this_machine_has_memory():
    assert 0 < available_memory() <= psutil.virtual_memory().total


# ---- what is needed ----


def of(path, backend="parallel", quant="keep"):
    return outlined(plan_model(open_checkpoint(path), Conversion(quant)), create_backend(backend))


@pytest.mark.each_value
@pytest.mark.parametrize("backend", ["simd", "parallel", "mlx"])
@pytest.mark.parametrize(("path", "quant"), [(HF, "keep"), (HF, "q8_0"), (Q8, "keep"), (Q8, "q4_0"), (Q8, "f32")])
def test_the_weights_take_as_much_as_said(monkeypatch, backend, path, quant):
    nbytes, views = 0, 0
    before = parameters_module.Parameters._prepare

    def prepare(self, name, weight, source=None):
        nonlocal nbytes, views
        is_new = (name, weight.type.name) not in self._prepared
        made = before(self, name, weight, source)
        if is_new:
            nbytes += made.nbytes
            views += made.nbytes if len(weight.shape) > 1 and is_view(made, (source or weight).data) else 0
        return made

    expected = need_of(of(path, backend, quant))
    monkeypatch.setattr(parameters_module.Parameters, "_prepare", prepare)
    mlx_engine.load(path, backend, quant)
    assert (expected.weights, expected.mapped) == (nbytes, views)


@pytest.fixture(scope="module")
def halves(tmp_path_factory):
    """The micro model in bfloat16."""
    path = tmp_path_factory.mktemp("model") / "bf16.gguf"
    with open_gguf(DATA / "model-f32.gguf") as file:
        weights = [file.weight(name) for name in file.tensors]
        matrices = [weight.as_type(BY_NAME["BF16"]) if len(weight.shape) > 1 else weight for weight in weights]
        write_gguf(path, file.typed_metadata(), matrices)
    return path


def test_what_is_expanded_is_said_with_the_option_that_helps(monkeypatch, halves):
    monkeypatch.setattr(outline, "WORTH_A_LINE", 1)
    (line,) = expansions(of(halves), "parallel")
    assert line.startswith("parallel has no kernel for BF16: ")
    assert "as floats; --quant q8_0 rounds them to" in line
    assert not list(expansions(of(halves, quant="q8_0"), "parallel"))
    assert not list(expansions(of(Q8), "parallel"))
    # Python floats take more memory than any file, and no option helps.
    assert not list(expansions(of(halves, "scalar"), "scalar"))


# ---- the comparison ----


def test_a_model_that_cannot_fit_is_refused_unless_it_is_allowed(caplog, monkeypatch):
    monkeypatch.setattr(log.LOGGER, "propagate", True)
    found = Need(weights=8 * GIB, mapped=0, kv=GIB, workspace=0, saved=5 * GIB)
    with pytest.raises(NotEnoughMemoryError) as caught:
        found.check("here", 9 * GIB - 1)
    expected = "here: expected 9.0 GiB of memory (8.0 GiB of weights, 1.0 GiB of keys and values), found 9.0 GiB free; "
    assert str(caught.value).startswith(expected + "--quant q8_0 saves about 5.0 GiB, fewer tokens")
    found.check("here", 9 * GIB)
    assert not caplog.messages
    found.check("here", GIB, allowed=True)
    assert len(caplog.messages) == 1


def test_a_mapped_file_that_is_larger_than_the_memory_is_no_reason_to_refuse(caplog, monkeypatch):
    monkeypatch.setattr(log.LOGGER, "propagate", True)
    Need(weights=8 * GIB, mapped=8 * GIB, kv=GIB, workspace=0).check("here", 2 * GIB)
    assert caplog.messages[0].startswith("warning: here: needs 9.0 GiB of memory")


@pytest.mark.parametrize(("free", "streams"), [(9, False), (8, True), (1, True)])
def test_experts_that_do_not_fit_are_read_when_tokens_choose_them(caplog, monkeypatch, free, streams):
    monkeypatch.setattr(log.LOGGER, "propagate", True)
    monkeypatch.setattr(log, "_warned", set())
    need = Need(weights=8 * GIB, mapped=8 * GIB, kv=GIB, workspace=0, experts=7 * GIB)
    assert need.check("here", free * GIB) == streams
    said = ["the 7.0 GiB of experts are read from the file when tokens choose them" in text for text in caplog.messages]
    assert said == [[True], [False], []][[8, 1, 9].index(free)]


@pytest.fixture
def small(monkeypatch):
    """A machine with little memory, which looks at every model."""
    monkeypatch.setattr(engine_module, "FEW_PARAMETERS", 0)
    monkeypatch.setattr(engine_module, "available_memory", lambda: 1 << 20)


class WeightReadError(Exception):
    """A weight was read."""


@pytest.mark.usefixtures("small")
def test_commands_compare_before_they_read_a_weight(monkeypatch):
    read = Tensor.weight
    monkeypatch.setattr(
        Tensor, "weight", lambda tensor, of: pytest.fail("read") if len(tensor.shape) > 1 else read(tensor, of)
    )
    for command in (["generate", "a"], ["chat"], ["bench", "-p", 4, "-n", 0]):
        found = cli(command[0], "--model", HF, "--backend", "parallel", *command[1:])
        assert (found.code, found.out) == (1, "")
        assert "MiB of memory" in only_line(found)
        assert "--quant q8_0 saves" in found.err


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_the_option_loads_a_model_anyway(monkeypatch):
    monkeypatch.setattr(roofline, "SECONDS", 1e-4)
    found = generate("a", "-n", 1, "-q", "--allow-too-large", model=HF)
    assert (found.code, found.err.count("warning: ")) == (0, 1)
    asked = "-m", HF, "-b", "simd", "-p", 4, "-r", 1, "--allow-too-large"
    for more in (["-n", 0], ["-n", 2, "--concurrency", 1]):
        assert cli("bench", *asked, *more).code == 0


@pytest.mark.usefixtures("small")
def test_the_cache_counts_too(monkeypatch):
    monkeypatch.setattr(engine_module, "available_memory", lambda: need_of(of(HF), 64).least)
    assert generate("a", "-n", 1, "-q", model=HF, backend="parallel").code == 0
    refused = generate("a", "-n", 2000, "-q", model=HF, backend="parallel")
    assert (refused.code, "of keys and values" in only_line(refused)) == (1, True)


# ---- memory that runs out ----


def test_memory_that_runs_out_while_loading_is_one_line(monkeypatch):
    def prepare(self, name, weight, source=None):
        raise MemoryError("Unable to allocate 594. MiB")

    monkeypatch.setattr(parameters_module.Parameters, "_prepare", prepare)
    found = generate("a", model=HF)
    assert found.code == 1
    assert "found Unable to allocate 594. MiB; " in only_line(found)
    with pytest.raises(NotEnoughMemoryError):
        mlx_engine.load(HF)


def test_memory_that_runs_out_in_a_run_is_one_line(monkeypatch):
    def run(self, requests, scheduler=None):
        raise MemoryError

    monkeypatch.setattr(mlx_engine.Engine, "run_requests", run)
    found = generate("a", "-q")
    assert (found.code, "expected enough memory" in only_line(found)) == (1, True)
