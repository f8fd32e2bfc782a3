"""Ministral 3, and the text models of Mistral Small 3.1 and later.

Reference: Hugging Face transformers, models/ministral3 and models/mistral3. Differences from Llama: YaRN, and queries
that are scaled by a factor that grows with the position (Llama 4's attention scaling). In folders of models that also
read images, the settings of the text model are under `text_config`; the image encoder is ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from mlx_engine.checkpoint.model_files import Checkpoint
from mlx_engine.config.declared import Expected, each_layer, whole_or_none
from mlx_engine.config.rope import Rotation, rotation
from mlx_engine.config.settings import HARMLESS, Settings
from mlx_engine.models import llama, standard
from mlx_engine.weights.plan import Plan
from mlx_engine.weights.table import decoder_plan

ARCHITECTURES = ("ministral3", "mistral3")
GGUF_ARCHITECTURE = "mistral3"

# Keys next to `text_config` in config.json that do not change the text model.
AROUND_TEXT = {
    *HARMLESS,
    "image_token_index",
    "multimodal_projector_bias",
    "projector_hidden_act",
    "spatial_merge_size",
    "vision_config",
    "vision_feature_layer",
}
# For three kinds of Hugging Face folders, the prefix of the text model's tensors and the prefix of its head. The kinds:
# folders of text models, older folders with an image encoder, newer folders with an image encoder.
STEMS = (("model.", ""), ("language_model.model.", "language_model."), ("model.language_model.", ""))


@dataclass(frozen=True)
class Config(llama.Config):
    rope: Rotation = rotation(rules=("yarn",), grows=True)
    window: int | None = whole_or_none(None, ("sliding_window", None))

    expected = Expected(
        gguf=llama.Config.expected.gguf,
        hf={"hidden_act": "silu", **llama.NO_BIAS, "layer_types": each_layer("full_attention")},
    )


Model = standard.Model


def plan(checkpoint: Checkpoint) -> Plan:
    return text_plan(checkpoint, of_text)


def of_text(checkpoint: Checkpoint, settings: Settings | None) -> Plan:
    made = decoder_plan(checkpoint, Config, llama.TENSORS | llama.PERMUTED, settings=settings)
    return standard.with_rotation(checkpoint, made)


def text_plan(
    checkpoint: Checkpoint,
    planned: Callable[[Checkpoint, Settings | None], Plan],
    around: Collection[str] = AROUND_TEXT,
) -> Plan:
    """Return the plan of the text model: its config, and the tensors that it needs.

    Args:
        checkpoint: a GGUF file of the text model, or a folder that may also have an image encoder.
        planned: a function that returns the plan, given a checkpoint and the settings under `text_config` (None without
            `text_config`). A GGUF file's checkpoint is passed unchanged. A folder's has only the text model's tensors,
            with their names in a folder of the text model alone.
        around: the keys next to `text_config` that do not change the text model.

    Raises:
        UnsupportedConfigError: a setting is missing, invalid or not implemented.
    """
    settings = Settings(checkpoint.settings, where=checkpoint.where)
    if checkpoint.naming == "gguf":
        return planned(checkpoint, None)
    text, unused = settings.mapping("text_config"), list[str]()
    if text is not None:
        settings.refuse_rest(around)
        unused = [name for name in checkpoint.shapes if "vision_" in name or "multi_modal_projector." in name]
    model, head = next((of for of in STEMS if f"{of[0]}embed_tokens.weight" in checkpoint.shapes), STEMS[0])

    def full(name: str) -> str:
        """Return a tensor's name in this folder, given its name in a folder of the text model alone."""
        return f"{model}{name.removeprefix('model.')}" if name.startswith("model.") else f"{head}{name}"

    def short(name: str) -> str:
        """Return a tensor's name in a folder of the text model alone, given its name in this folder."""
        if name.startswith(model):
            return f"model.{name.removeprefix(model)}"
        return name.removeprefix(head)

    names = {short(name): name for name in checkpoint.shapes if name not in unused}
    alone = replace(
        checkpoint, shapes={name: checkpoint.shapes[of] for name, of in names.items()},
        weight=lambda name: checkpoint.weight(names[name]),
    )  # fmt: skip
    made = planned(alone, text)
    tensors = [replace(of, hf=replace(of.stored("hf"), name=full(of.stored("hf").name))) for of in made.tensors]
    return replace(made, tensors=tensors, unused=(*map(full, made.unused), *unused))
