"""What SGLang cannot do, refused before a model is loaded: reason and remedy in one line."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tasks.config import Device, Dtype, Role
from tasks.engines.all_reduce import uses_custom_all_reduce
from tasks.engines.base import LaunchPlan
from tasks.engines.environment import ask_environment
from tasks.engines.inside.sglang_plugin import CAPTURE_VERSION, PLATFORM
from tasks.engines.model_folder import drafter_ids, model_config, num_layers, text_config
from tasks.errors import NotSupported

OLDEST, OLDEST_CPU = (0, 5, 16), (0, 5, 23)
# How set_eagle3_layers_to_capture reads explicit ids: Llama and DeepSeek measured, the others assumed to be as Llama.
PLUS_ONE = frozenset({
    "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen2MoeForCausalLM",
    "Qwen3MoeForCausalLM",
})
UNLESS_FIRST_IS_ONE = frozenset({
    "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "KimiK25ForConditionalGeneration",
})
OWNED_FLAGS = frozenset({  # flags that `command` renders from the campaign; a second value would win unseen
    "--host", "--port", "--model-path", "--model", "--served-model-name", "--dtype", "--context-length", "--tp-size",
    "--tp", "--tensor-parallel-size", "--max-running-requests", "--disable-radix-cache", "--chunked-prefill-size",
    "--max-total-tokens", "--mem-fraction-static", "--device", "--attention-backend", "--sampling-backend",
    "--cuda-graph-backend-decode", "--cuda-graph-backend-prefill", "--disable-custom-all-reduce",
    "--speculative-algorithm", "--speculative-draft-model-path", "--speculative-num-steps",
    "--speculative-eagle-topk", "--speculative-num-draft-tokens", "--pp-size", "--pipeline-parallel-size",
    "--enable-return-aux-hidden-states", "--incremental-streaming-output", "--stream-output",
})
PROBE = """
import importlib.metadata as metadata, importlib.util, json, os
found = {}
for name in ("sglang", "torch", "transformers", "drafthouse"):
    try:
        found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
found["platforms"] = ",".join(sorted({e.name for e in metadata.entry_points(group="sglang.srt.platforms")}))
spec = importlib.util.find_spec("sglang")
found["folder"] = os.path.dirname(spec.origin) if spec and spec.origin else ""
try:
    from tasks.engines.inside.sglang_plugin import CAPTURE_VERSION
    found["plugin"] = CAPTURE_VERSION
except ImportError:
    pass
print(json.dumps(found))
"""
_CLASS = re.compile(r"^class (\w+)\(([^)]*)\)|^    def (set_eagle3_layers_to_capture)\(", re.MULTILINE)


@lru_cache(maxsize=16)
def environment(python: str, variables: tuple[tuple[str, str], ...] = ()) -> dict[str, str]:
    """Versions in an engine environment, its platform plugins and the `folder` of its SGLang.

    Nothing heavy is imported. `variables` are those that the environment needs, such as PYTHONPATH.
    Raises NotSupported if that interpreter does not run or has no SGLang.
    """
    found: dict[str, str] = ask_environment(python, PROBE, variables)
    if "sglang" not in found or not found["folder"]:
        raise NotSupported(f"{python}: SGLang is not installed in this engine environment")
    return found


def check_plan(plan: LaunchPlan) -> None:
    """Raises NotSupported for the first thing that cannot work."""
    found = environment(plan.python, plan.machine.environment_of(plan.arm).pairs)
    cpu = plan.machine.device is Device.cpu
    oldest = OLDEST_CPU if cpu else OLDEST
    if tuple(int(part) for part in re.findall(r"\d+", found["sglang"])[:3]) < oldest:
        wanted = f"{plan.machine.device} takes {'.'.join(map(str, oldest))} or newer"
        raise NotSupported(f"{plan.python}: SGLang {found['sglang']}, but {wanted}")
    own = (version("drafthouse"), CAPTURE_VERSION)
    there = (found.get("drafthouse", "none"), found.get("plugin", "none"))
    if there != own:
        raise NotSupported(
            f"{plan.python}: has drafthouse {there[0]} with plugin {there[1]}, this is {own[0]} with {own[1]}; "
            "install it there with --no-deps"
        )
    _check_plugins(plan, found)
    _check_flags(plan)
    config = model_config(plan)
    if plan.arm.role is not Role.base:
        name = str(config["architectures"][0])
        if not hands_out_states(Path(found["folder"]), name):
            raise NotSupported(
                f"target.model: SGLang's class for {name} hands out no auxiliary states "
                "(set_eagle3_layers_to_capture), which extraction and EAGLE-3 need; use a base arm, or another engine"
            )
    if plan.arm.role is Role.extraction:
        _check_extraction(plan)
    if plan.arm.role is Role.speculative:
        _check_drafter(plan, config)


def _check_plugins(plan: LaunchPlan, found: dict[str, str]) -> None:
    declared = [*plan.machine.environment_of(plan.arm).variables, *plan.arm.tuning.variables]
    variables = {variable.name: variable.value for variable in declared}
    platform, installed = variables.get("SGLANG_PLATFORM", ""), set(filter(None, found["platforms"].split(",")))
    if plan.machine.device is Device.cpu:
        if platform not in ("", PLATFORM):
            raise NotSupported(f"SGLANG_PLATFORM={platform}: on a CPU SGLang runs by {PLATFORM}; remove the variable")
        if PLATFORM not in installed:
            raise NotSupported(f"{plan.python}: no platform plugin {PLATFORM}; install drafthouse there with --no-deps")
    elif platform == "" and len(others := installed - {PLATFORM}) > 1:
        raise NotSupported(
            f"{plan.python}: two platform plugins ({', '.join(sorted(others))}); name one by SGLANG_PLATFORM in the "
            "environment's variables"
        )
    elif platform and plan.arm.role is Role.extraction:
        raise NotSupported(
            f"SGLANG_PLATFORM={platform}: SGLang then leaves out the plugins of other packages that have a platform, "
            "drafthouse's capture too; extract in an environment without that variable"
        )
    chosen = variables.get("SGLANG_PLUGINS")
    if chosen is not None and not {"drafthouse", PLATFORM} <= set(chosen.split(",")):
        raise NotSupported(f"SGLANG_PLUGINS={chosen} leaves out drafthouse; add drafthouse,{PLATFORM} or remove it")


def _check_flags(plan: LaunchPlan) -> None:
    tuning = plan.arm.tuning
    for argument in tuning.extra_args:
        flag = argument.split("=")[0].replace("_", "-")
        if flag in ("--speculative-eagle-topk", "--speculative-num-draft-tokens"):
            raise NotSupported("tuning.extra_args: speculation is one chain here (topk 1); trees are not supported")
        if flag in ("--pp-size", "--pipeline-parallel-size"):
            raise NotSupported("tuning.extra_args: pipeline parallelism is not supported; use tuning.tensor_parallel")
        if flag in OWNED_FLAGS:
            raise NotSupported(f"tuning.extra_args: {flag} belongs to the campaign's own fields; set it there")
    undecided = plan.arm.model_copy(update={"tuning": tuning.model_copy(update={"custom_all_reduce": None})})
    if tuning.custom_all_reduce and uses_custom_all_reduce(replace(plan, arm=undecided)) is False:
        raise NotSupported(
            "tuning.custom_all_reduce: needs peer access, which NCCL_P2P_DISABLE or the NCCL profile "
            f"{tuning.nccl_profile} turns off; set it to false or change the profile"
        )
    if plan.machine.device is not Device.cpu:
        return
    if tuning.attention_backend not in (None, "torch_native"):
        raise NotSupported("tuning.attention_backend: SGLang has only torch_native on a CPU; leave it empty")
    if tuning.cuda_graph:
        raise NotSupported("tuning.cuda_graph: there are no CUDA graphs on a CPU; leave it empty")
    if tuning.tensor_parallel != 1:
        raise NotSupported("tuning.tensor_parallel: on a CPU one process serves; set it to 1")


def _check_extraction(plan: LaunchPlan) -> None:
    if plan.drafter_dir is not None:
        raise NotSupported("an extraction server takes no drafter: start it without")
    if plan.capture_dir is None:
        raise NotSupported("an extraction server needs a capture folder")
    if plan.arm.tuning.prefix_cache:
        raise NotSupported("tuning.prefix_cache must be false for extraction: cached tokens have no states")
    points, layers = plan.engine_points, num_layers(plan)
    if not points or len(set(points)) != len(points) or min(points) < 1 or max(points) > layers:
        raise NotSupported(
            f"drafter.points {list(points)}: SGLang hands out distinct hidden_states indices from 1 to {layers} for "
            "this target (0, the embeddings, not)"
        )


def capture_points(plan: LaunchPlan) -> list[int]:
    """Indices in the order in which the shards hold them: the asked points and N, before the final norm."""
    return sorted({*plan.engine_points, num_layers(plan)})


def _check_drafter(plan: LaunchPlan, config: dict[str, Any]) -> None:
    if plan.drafter_dir is None:
        raise NotSupported("a speculative arm needs a drafter folder (speculative.drafter)")
    if not any(plan.drafter_dir.glob("*.safetensors")):
        raise NotSupported(f"speculative.drafter: {plan.drafter_dir} has no weights (*.safetensors)")
    ids = drafter_ids(plan)
    if ids is None:
        return  # SGLang's default, [2, n // 2, n - 3], which is hidden_states as it stands
    points, layers = tapped_points(str(config["architectures"][0]), ids), num_layers(plan)
    if len(set(points)) != 3 or min(points) < 1 or max(points) >= layers:
        raise NotSupported(
            f"speculative.drafter: by its ids {ids} SGLang taps hidden_states {points}, but needs three distinct ones "
            f"from 1 to {layers - 1}; set eagle_aux_hidden_state_layer_ids in {plan.drafter_dir}/config.json"
        )


def tapped_points(model_class: str, ids: list[int]) -> list[int]:
    """hidden_states indices that SGLang hands to a drafter whose config.json has these ids, in their order."""
    if model_class in PLUS_ONE or (model_class in UNLESS_FIRST_IS_ONE and ids[0] == 1):
        return sorted(i + 1 for i in ids)
    if model_class in UNLESS_FIRST_IS_ONE:
        return sorted(ids)
    raise NotSupported(
        f"SGLang: how {model_class} reads auxiliary layer ids has not been measured here; extract and serve such a "
        "drafter on vLLM, or measure it and add the class to tasks/engines/sglang_check.py"
    )


def layer_ids(model_class: str, num_layers: int, points: tuple[int, ...]) -> list[int]:
    """Ids by which SGLang taps exactly `points`; see `tapped_points`.

    A DeepSeek class shifts all ids when the first is 1; since their order means nothing to it, another
    one then comes first.
    """
    if not points or list(points) != sorted(set(points)) or points[0] < 1 or points[-1] >= num_layers:
        raise NotSupported(
            f"drafter.points {list(points)}: SGLang hands a drafter ascending distinct hidden_states indices from 1 to "
            f"{num_layers - 1} of this target, neither the embeddings (0) nor the last ({num_layers}); choose others"
        )
    for ids in ([p - 1 for p in points], list(points), [*points[1:], points[0]]):
        if tapped_points(model_class, ids) == list(points):
            return ids
    raise NotSupported(f"drafter.points {list(points)}: SGLang's {model_class} cannot be asked for them; choose others")


@lru_cache(maxsize=32)
def hands_out_states(sglang: Path, name: str) -> bool:
    """Whether a model class of that SGLang, or a class that it derives from, can be asked for auxiliary states."""
    bases: dict[str, list[str]] = {}
    able: set[str] = set()
    for file in sorted((sglang / "srt" / "models").glob("*.py")):
        current = ""
        for match in _CLASS.finditer(file.read_text()):
            if match[3]:
                able.add(current)
            else:
                current = match[1]
                bases.setdefault(current, [base.strip() for base in match[2].split(",")])
    seen: set[str] = set()
    waiting = [name]
    while waiting:
        current = waiting.pop()
        if current in able:
            return True
        if current not in seen:
            seen.add(current)
            waiting += bases.get(current, [])
    return False


def kv_tokens(plan: LaunchPlan) -> int | None:
    """Tokens of the KV cache to ask for; None on CUDA where SGLang measures the free memory itself.

    On a CPU its share of the machine's memory would be nearly all of it, so a cache for all running
    requests at full length is asked for, at most 1 GiB of it.
    """
    tuning = plan.arm.tuning
    if tuning.kv_tokens is not None:
        return tuning.kv_tokens
    if tuning.kv_cache_gib is not None:
        return int(tuning.kv_cache_gib * (1 << 30)) // kv_bytes_per_token(plan)
    if plan.machine.device is not Device.cpu:
        return None
    wanted = tuning.max_running_requests * plan.target.max_model_len
    return max(min(wanted, (1 << 30) // kv_bytes_per_token(plan)), plan.target.max_model_len + 64)


def kv_bytes_per_token(plan: LaunchPlan) -> int:
    """Bytes of keys and values (or of MLA's latent vector) of one token in all layers."""
    text = text_config(model_config(plan))
    item = 4 if plan.target.dtype is Dtype.float32 else 2
    if text.get("kv_lora_rank"):
        width = text["kv_lora_rank"] + text.get("qk_rope_head_dim", 0)
    else:
        heads = text["num_attention_heads"]
        width = 2 * (text.get("num_key_value_heads") or heads) * (text.get("head_dim") or text["hidden_size"] // heads)
    return int(num_layers(plan) * width * item)
