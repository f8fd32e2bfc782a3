"""Which of two kinds each layer is: read from GGUF files and config.json, and written so that it is read again."""

from types import SimpleNamespace

import pytest

from mlx_engine.config.declared import Naming
from mlx_engine.config.layer_kinds import LayerKinds
from mlx_engine.config.settings import Settings
from mlx_engine.errors import UnsupportedConfigError

INTERVAL: dict[Naming, str] = {"gguf": "interval", "hf": "interval"}
EVERY_THIRD = (True, True, False, True, True, False, True)
IRREGULAR = (True, False, False, True, False, True, True)


def read(of: LayerKinds, naming: Naming, settings: dict[str, object], window: int = 8) -> tuple[bool, ...]:
    known = SimpleNamespace(n_layers=len(EVERY_THIRD), window=window)
    return of.read(Settings(settings, where="here"), naming, known)


@pytest.mark.parametrize("value", [EVERY_THIRD, IRREGULAR, (True,) * 7, (False,) * 7])
@pytest.mark.parametrize(
    ("of", "namings"),
    [
        (LayerKinds(3), ["hf"]),
        (LayerKinds(3, None, flags={"hf": "flags"}), ["hf"]),
        (LayerKinds(3, flags={"gguf": "flags"}), ["gguf", "hf"]),
        (LayerKinds(2, ("a", "b"), interval=INTERVAL), ["hf"]),
    ],
)
def test_what_is_written_is_read_again(of: LayerKinds, namings: list[Naming], value: tuple[bool, ...]):
    for naming in namings:
        keys = of.to_gguf(value) if naming == "gguf" else of.to_hf(value, None)
        assert read(of, naming, dict(keys)) == value


def test_an_interval_is_written_unless_it_is_the_usual_one():
    assert LayerKinds(3, interval=INTERVAL).to_gguf(EVERY_THIRD) == {}
    assert LayerKinds(3, interval=INTERVAL, writes_usual=True).to_gguf(EVERY_THIRD) == {"interval": 3}
    assert LayerKinds(2, interval=INTERVAL).to_gguf(EVERY_THIRD) == {"interval": 3}
    assert read(LayerKinds(2, interval=INTERVAL), "gguf", {"interval": 3}) == EVERY_THIRD
    assert LayerKinds(3).to_gguf(IRREGULAR) == {}


def test_a_model_without_a_window_and_the_last_layer_of_a_folder():
    of = LayerKinds(3, flags={"gguf": "flags"}, if_window=True)
    assert read(of, "gguf", {}, window=0) == (False,) * 7
    assert (read(of, "gguf", {}), of.to_gguf((False,) * 7)) == (EVERY_THIRD, {})
    last = LayerKinds(3, ends_with_second=True)
    assert (read(last, "hf", {}), read(last, "gguf", {})) == ((*EVERY_THIRD[:-1], False), EVERY_THIRD)


def test_other_names_are_refused():
    with pytest.raises(UnsupportedConfigError, match="layer_types"):
        read(LayerKinds(3), "hf", {"layer_types": ["a"] * 7})
