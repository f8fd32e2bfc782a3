"""A bounded number of experts in memory on `mlx` and `metal`: the same bits, and clear errors."""

import numpy as np
import pytest

import mlx_engine
from mlx_engine.backends import create_backend
from mlx_engine.backends.mlx import experts
from mlx_engine.backends.mlx.experts import FloatStack, Slots
from mlx_engine.cache import SequenceInput
from mlx_engine.errors import ModelError, OptionError
from mlx_engine.loop.forward import forward_logits
from mlx_engine.weights.conversion import Conversion
from mlx_engine.weights.model import plan_model
from mlx_engine.weights.outline import outlined
from tests.random_models import random_checkpoint
from tests.unit.test_command_generate import DATA, generate, only_line

MOE = DATA.parent / "qwen3moe-micro" / "hf"
# More than 64 rows of experts are sorted.
PROMPT, NEXT = [(7 * i) % 120 for i in range(36)], [3, 59]


def logits(planned, backend):
    """Return logits of a prompt in two chunks, and then of each of two tokens in a batch with another sequence."""
    model = planned.build(backend).model
    with backend.session():
        pool = model.new_pool(256)
        kv, other = pool.sequence(), pool.sequence()
        found = [forward_logits(model, SequenceInput(ids, kv, wanted=None)) for ids in (PROMPT[:33], PROMPT[33:])]
        for token in NEXT:
            found.append(forward_logits(model, SequenceInput([token], kv), SequenceInput(PROMPT[:3], other)))
        return np.concatenate([backend.host(rows) for rows in found])


@pytest.mark.some(2)
@pytest.mark.parametrize("name", ["mlx", "metal"])
@pytest.mark.parametrize(
    ("architecture", "type_name"),
    [
        ("qwen3moe", "Q8_0"),
        ("gpt-oss", "F32"),
        ("glm4moe", "Q4_K"),
        ("qwen3moe", "Q4_K"),
    ],
)
def test_few_experts_in_memory_have_the_bits_of_all(monkeypatch, name, architecture, type_name):
    monkeypatch.setenv("MLX_ENGINE_METAL", "emulate")
    planned = plan_model(random_checkpoint(architecture, type_name), Conversion())
    expected = logits(planned, create_backend(name))
    # Two of six experts are in memory.
    assert np.array_equal(logits(planned._replace(held_share=0.34), create_backend(name)), expected)


@pytest.mark.parametrize("name", ["mlx", "metal"])
def test_the_bytes_of_all_experts_are_those_that_slots_would_hold(monkeypatch, name):
    """On metal Q6_K is expanded, and scales become float32."""
    monkeypatch.setenv("MLX_ENGINE_METAL", "emulate")
    made = []

    class Noted(Slots):
        def __init__(self, *args):
            super().__init__(*args)
            made.append(self.nbytes)

    for type_name in ("Q6_K", "Q8_0"):
        planned, backend = plan_model(random_checkpoint("qwen3moe", type_name), Conversion()), create_backend(name)
        sizes = outlined(planned, backend).sizes
        expected = sizes.expert_nbytes
        assert sizes.nbytes > expected  # the other weights
        monkeypatch.setattr(experts, "Slots", Noted)
        made.clear()
        planned._replace(held_share=0.34).build(backend)
        assert sum(made) == expected, type_name
        monkeypatch.undo()
        monkeypatch.setenv("MLX_ENGINE_METAL", "emulate")


def test_the_experts_chosen_least_often_are_replaced():
    import mlx.core as mx

    read = []

    def of(e):
        read.append(e)
        return FloatStack(mx.full((1, 2, 3), float(e)))

    slots = Slots(of, 5, 2)
    read.clear()
    for ids in ([[1, 3]], [[1, 1]], [[1, 4]], [[3, 1]], [[0, 2], [3, 4]]):
        y = slots.multiply(mx.ones((len(ids), 1, 1, 3)), mx.array(ids), are_sorted=False)
        assert np.array_equal(np.array(y), np.broadcast_to(3.0 * np.array(ids)[..., None, None], (len(ids), 2, 1, 2)))
    assert read == [1, 3, 4, 3, 0, 2, 3, 4]
    assert slots.nbytes == 5 * 2 * 3 * 4


def test_experts_of_several_types_are_refused():
    import mlx.core as mx

    slots = Slots(lambda e: FloatStack(mx.zeros((1, 2, 3 + e))), 2, 1)
    with pytest.raises(ModelError, match="several types"):
        slots.multiply(mx.ones((1, 1, 1, 3)), mx.array([[1]]), are_sorted=False)


def test_a_model_from_a_folder_runs_with_half_of_its_experts():
    with mlx_engine.load(MOE, "mlx") as all_of, mlx_engine.load(MOE, "mlx", experts_memory=100_000) as half:
        assert half._about == all_of._about
        assert np.array_equal(half.logits(PROMPT), all_of.logits(PROMPT))


@pytest.mark.parametrize(
    ("source", "backend", "nbytes", "message"),
    [
        (MOE, "scalar", 1 << 20, "experts_memory needs a backend with compiled kernels, or mlx, metal or cuda; scalar"),
        (DATA / "hf", "mlx", 1 << 20, "experts_memory needs a model with experts"),
        (MOE, "mlx", 10, "the 3 experts of one token in every layer need"),
        (MOE, "mlx", 0, "experts_memory must be a number of bytes above 0, not 0"),
    ],
)
def test_a_bound_that_cannot_hold_is_refused(source, backend, nbytes, message):
    with pytest.raises(OptionError, match=message):
        mlx_engine.load(source, backend, experts_memory=nbytes)


def test_the_command_line_takes_a_size():
    found = generate("a", "-n", 1, "-q", "--backend", "mlx", "--experts-memory", "1GiB", model=DATA / "model-q8_0.gguf")
    assert "--experts-memory needs a model with experts" in only_line(found)
