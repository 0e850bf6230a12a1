"""Build a tiny random DeepSeek-V3: `python deployments/models/tiny_mla/build.py OUT [--nested] [--layers 8]`.

Latent attention (MLA), one dense layer and then experts, as in Kimi-K2.5; about 4 MB in float32. The
weights are noise from a seed, so nothing is shipped: what it is for is that the engines agree about
its layers. Tokenizer and chat template are the tiny Llama's. With --nested the same model stands in a
`text_config` wrapper, its tensors under `language_model.`, as Kimi-K2.5 has it.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, DeepseekV3Config, DeepseekV3ForCausalLM

TOKENIZER = Path(__file__).resolve().parent.parent / "tiny_llama" / "model"
# What SGLang reads from config.json and transformers does not write.
FOR_SGLANG = {
    "moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "ep_size": 1, "rope_theta": 10000.0
}
# The wrapper has to name a vision tower; its weights are absent, since no image is ever sent.
VISION = {
    "hidden_size": 32, "vt_hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64,
    "patch_size": 14, "init_pos_emb_height": 4, "init_pos_emb_width": 4, "init_pos_emb_time": 4,
    "merge_kernel_size": [2, 2],
}


def build(
    out: Path, *, layers: int = 8, width: int = 128, seed: int = 0, nested: bool = False,
    tokenizer_from: Path = TOKENIZER,
) -> Path:
    """Write the model folder `out` and return it."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_from)
    config = DeepseekV3Config(
        vocab_size=len(tokenizer), hidden_size=width, intermediate_size=2 * width, moe_intermediate_size=64,
        num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=4, n_shared_experts=1,
        n_routed_experts=4, num_experts_per_tok=2, n_group=2, topk_group=1, routed_scaling_factor=1.0,
        norm_topk_prob=True, first_k_dense_replace=1, kv_lora_rank=32, q_lora_rank=48, qk_rope_head_dim=16,
        qk_nope_head_dim=32, v_head_dim=32, max_position_embeddings=2048, rope_parameters=None,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id, tie_word_embeddings=False, num_nextn_predict_layers=0,
    )
    config.dtype = "float32"
    torch.manual_seed(seed)
    model = DeepseekV3ForCausalLM(config).float()
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2:  # larger than the usual 0.02, so that layers change what passes through them
            torch.nn.init.normal_(parameter, std=0.1 if "embed" not in name else 1.0)
    model.save_pretrained(out)
    _extend_config(out / "config.json")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (tokenizer_from / name).exists() and tokenizer_from != out:
            shutil.copy(tokenizer_from / name, out / name)
    if nested:
        _nest(out)
    return out


def _extend_config(path: Path) -> None:
    config: dict[str, Any] = json.loads(path.read_text())
    path.write_text(json.dumps({**config, **FOR_SGLANG}, indent=1))


def _nest(out: Path) -> None:
    text = json.loads((out / "config.json").read_text())
    text["architectures"] = ["DeepseekV3ForCausalLM"]
    wrapper = {
        "architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "dtype": text["dtype"],
        "text_config": text, "vision_config": VISION | {"text_hidden_size": text["hidden_size"]},
        "tie_word_embeddings": False,
        "bos_token_id": text["bos_token_id"], "eos_token_id": text["eos_token_id"],
        "pad_token_id": text["pad_token_id"],
    }
    (out / "config.json").write_text(json.dumps(wrapper, indent=1))
    tensors = {f"language_model.{name}": tensor for name, tensor in load_file(out / "model.safetensors").items()}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--nested", action="store_true")
    asked = parser.parse_args()
    print(build(asked.out, layers=asked.layers, seed=asked.seed, nested=asked.nested))
