"""Make LoRA adapters of the micro checkpoints with PEFT, and their logits, in tests/data/adapters.

Computed in float64. The tests never run this. It needs torch, transformers and peft:

    python -m tests.golden.make_adapter_goldens
"""

from __future__ import annotations

import json
import shutil
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from tests.golden.make_goldens import DATA

OUT = DATA / "adapters"
PLAIN: dict[str, Any] = {"r": 4, "lora_alpha": 8}
# rsLoRA, and ranks and factors of single modules.
RS: dict[str, Any] = {"r": 3, "lora_alpha": 2, "use_rslora": True}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
GATED = ["gate_proj", "up_proj", "down_proj"]
# By base: for each adapter the settings, which have the modules.
ADAPTERS: dict[str, list[dict[str, Any]]] = {
    "llama": [
        {**PLAIN, "target_modules": [*ATTENTION, *GATED]},
        {**RS, "target_modules": ["q_proj", "v_proj"]},
        {
            "r": 20, "lora_alpha": 20, "target_modules": ["o_proj", "down_proj"],
            "rank_pattern": {"o_proj": 2}, "alpha_pattern": {"layers.1.mlp.down_proj": 5},
        },
    ],
    "phi3": [{**PLAIN, "target_modules": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]}],
    "gpt2": [{**PLAIN, "target_modules": ["c_attn", "c_fc", "c_proj"], "fan_in_fan_out": True}],
    "gemma3": [{**PLAIN, "target_modules": [*ATTENTION, *GATED]}],
    "lfm2": [{**PLAIN, "target_modules": ["in_proj", "out_proj", "w1", "w2", "w3", "q_proj"]}],
}  # fmt: skip
IDS = [i * 7 % 61 for i in range(1, 18)]


def make(base: str) -> None:
    """Write the adapters of a base and their logits."""
    torch.manual_seed(len(base))
    logits = {}
    for i, settings in enumerate(ADAPTERS[base]):
        model = AutoModelForCausalLM.from_pretrained(DATA / f"{base}-micro" / "hf", dtype=torch.float64).eval()
        tuned = get_peft_model(model, LoraConfig(lora_dropout=0.0, **settings)).double().eval()
        with torch.no_grad():
            for name, value in tuned.named_parameters():
                if "lora_" in name:
                    value.copy_((0.2 * torch.randn_like(value)).to(torch.bfloat16).double())
            logits[f"logits{i}"] = tuned(torch.tensor([IDS])).logits[0].numpy().astype(np.float32)
        folder = OUT / f"{base}-{i}"
        shutil.rmtree(folder, ignore_errors=True)
        tuned.to(torch.bfloat16).save_pretrained(folder)
        (folder / "README.md").unlink()
        config = json.loads((folder / "adapter_config.json").read_text())
        config["base_model_name_or_path"] = f"{base}-micro"
        (folder / "adapter_config.json").write_text(json.dumps(config, indent=1, sort_keys=True))
    np.savez_compressed(OUT / f"{base}.npz", ids=np.array(IDS, dtype=np.int32), **logits)


if __name__ == "__main__":
    OUT.mkdir(exist_ok=True)
    for base in ADAPTERS:
        make(base)
