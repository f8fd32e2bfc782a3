"""How mlx-lm's folders store the tensors of a model: under which names, and in which form.

A tensor that mlx-lm has as transformers has it keeps its name and its form. The others are here: experts are stacked,
Granite 4's gate and up are cut in two, GPT-2's matrices are not transposed, and a text model inside of a model of
images has mlx-lm's prefix.
"""

from __future__ import annotations

import re
from dataclasses import replace

from mlx_engine.weights.plan import Tensor
from mlx_engine.weights.stored import Stored

# A part of one expert, and the module of a layer that has the experts.
_EXPERT = re.compile(r"ffn_(gate|up|down)_exps\.(\d+)\.(weight|bias)")
_EXPERTS = re.compile(r"\.(?:experts|switch_mlp)\.")
_DENSE = re.compile(r"\.ffn_(gate|up|down)\.weight")
_SHARED = ".shared_mlp."
_LAYER = re.compile(r"\.layers\.\d+$")
# The prefixes of a text model inside of another model, and of tensors of transformers' GPT-2.
_INNER = re.compile(r"^(?:model\.language_model\.|language_model\.model\.|model\.)")
_INNER_HEAD = re.compile(r"^(?:language_model\.)?lm_head\.")
_GPT2 = re.compile(r"^(?:transformer\.|model\.)?")


def mlx_form(tensor: Tensor, model_type: str, *, n_experts: int = 0, is_inner: bool = False) -> Stored:
    """Return how a folder that mlx-lm writes stores a tensor.

    Args:
        tensor: a tensor of the model.
        model_type: `model_type` of the folder's config.json.
        n_experts: the number of experts in each layer.
        is_inner: whether the model is inside of another one, `language_model` in mlx-lm.
    """
    stored = tensor.stored("hf")
    expert, dense = _EXPERT.search(tensor.name), _DENSE.search(tensor.name)
    if expert:
        block = _EXPERTS.split(stored.name)[0]
        name = f"{block}.{_module(block, model_type)}.{expert[1]}_proj.{expert[3]}"
        stored = Stored(name, expert=(int(expert[2]), n_experts))
    elif dense and _SHARED in stored.name:
        stored = Stored(f"{stored.name.split(_SHARED)[0]}.mlp.{dense[1]}_proj.weight")
    elif model_type == "gpt2":
        stored = replace(stored, name=_GPT2.sub("model.", stored.name), transposed=False)
    if not is_inner:
        return stored
    name = _INNER_HEAD.sub("language_model.lm_head.", _INNER.sub("language_model.model.", stored.name))
    return replace(stored, name=name)


def _module(block: str, model_type: str) -> str:
    """Return the module of `block` in which mlx-lm has all experts of a layer."""
    if model_type == "gpt_oss":
        return "experts"
    # Gemma 4 has experts in the layer itself, other models in a module of the layer.
    return "experts.switch_glu" if _LAYER.search(block) else "switch_mlp"
