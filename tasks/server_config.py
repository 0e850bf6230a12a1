"""The part of a campaign that one server depends on: target, machine, tuning, arms.

`tasks.config` is where everybody imports these from.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from tasks.errors import ConfigError

T = TypeVar("T")
_PROJECT = Path(__file__).resolve().parents[1]
NAME = r"^[a-z0-9][a-z0-9-]{0,39}$"
VARIABLE = r"^[A-Z_][A-Z0-9_]*$"
CAPABILITY = r"^\d+\.\d$"
IN_WORDS: Final = {
    NAME: "use 1 to 40 lower-case letters, digits and hyphens, with a letter or digit first",
    VARIABLE: "use upper-case letters, digits and underscores, with no digit first",
    CAPABILITY: "write it as two numbers with a point and in quotes, such as '12.0'",
}
SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSWORD|CREDENTIAL|API_?KEY", re.IGNORECASE)
HIDDEN = "***"


class Frozen(BaseModel):
    """Base of all config models: unknown keys are errors, values do not change."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


def each_once(values: tuple[T, ...]) -> tuple[T, ...]:
    """The values; raises ValueError that names what is listed more than once (named items by their names)."""
    twice = [str(name) for name, count in Counter(getattr(v, "name", v) for v in values).items() if count > 1]
    if twice:
        raise ValueError(f"listed more than once: {', '.join(twice)}")
    return values


class EngineName(StrEnum):
    vllm = "vllm"
    sglang = "sglang"
    stub = "stub"


class Role(StrEnum):
    base = "base"
    extraction = "extraction"
    speculative = "speculative"


class Device(StrEnum):
    cpu = "cpu"
    cuda = "cuda"


class Dtype(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class StubFault(StrEnum):
    """What a stub engine does wrong; the first five make the stage of that name fail."""

    launch = "launch"
    """exits with code 1 while loading"""
    benchmark = "benchmark"
    """streamed answers are HTTP 500"""
    regenerate = "regenerate"
    """answers of more than one token that are not streamed are HTTP 500"""
    extract = "extract"
    """healthy and answers, but no states are ever written"""
    align = "align"
    """states come from one layer further than asked"""
    silent = "silent"
    """answers 200 and never sends a token"""
    cut = "cut"
    """every third stream ends without a finish reason"""
    dies = "dies"
    """exits with code 3 at the twentieth streamed request"""
    template = "template"
    """adds two tokens to every prompt unasked"""
    settings = "settings"
    """attention runs on another backend than asked for"""
    capped = "capped"
    """runs two requests at most, whatever was asked for"""
    cached_suffix = "cached_suffix"
    """keeps a prefix cache and writes no states for cached tokens"""
    writer_full = "writer_full"
    """every write of states fails as on a full disk; the server lives"""
    no_drafts = "no_drafts"
    """no draft token is ever accepted"""
    no_counters = "no_counters"
    """speculative counters are not reported"""
    lossy = "lossy"
    """some answers differ from the target's own"""


class Interconnect(StrEnum):
    auto = "auto"
    single = "single"
    nvlink = "nvlink"
    pcie = "pcie"


class Variable(Frozen):
    name: str = Field(pattern=VARIABLE)
    """Name of the environment variable."""
    value: str
    """Its value, as text."""

    @property
    def shown(self) -> str:
        """The value for records and dry runs; secrets stay hidden."""
        return HIDDEN if SECRET_NAME.search(self.name) else self.value


class TargetShape(Frozen):
    """Facts of a model folder that is not on this machine, so that a dry run can render and estimate."""

    num_layers: int = Field(ge=1)
    """Decoder layers; hidden_states index N is after the last one."""
    width: int = Field(ge=1)
    """Width of the residual stream."""
    vocab_size: int = Field(ge=2)
    """Entries of the vocabulary."""
    weights_gib: float = Field(gt=0)
    """Size of the weights on disk, in GiB."""
    mla: bool = False
    """Multi-head latent attention (DeepSeek, Kimi)."""
    model_class: str = "LlamaForCausalLM"
    """Entry of `architectures` in its config.json."""


class Target(Frozen):
    model: str
    """Folder of the target model in Hugging Face format (config.json, safetensors, tokenizer)."""
    name: str = Field("target", pattern=NAME)
    """Short name under which it is served and reported."""
    dtype: Dtype = Dtype.float32
    """Number format of weights and activations while serving."""
    max_model_len: int = Field(1024, ge=16)
    """Longest prompt plus answer, in tokens."""
    trust_remote_code: bool = False
    """Run Python code that ships in the model folder."""
    shape: TargetShape | None = None
    """Facts of the model for a dry run where its folder is not at hand; checked against the folder where it is."""


class EngineEnvironment(Frozen):
    name: str = Field(pattern=NAME)
    """Name that arms refer to; by default an arm uses `<engine>-<device>`."""
    python: str
    """Python interpreter of the environment in which the engine is installed."""
    variables: Annotated[tuple[Variable, ...], AfterValidator(each_once)] = ()
    """Environment variables that this environment needs (PYTHONPATH, CUDA_HOME, ...)."""

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """`variables` as (name, value)."""
        return tuple((variable.name, variable.value) for variable in self.variables)


class Machine(Frozen):
    device: Device = Device.cpu
    """Where the engines run."""
    gpus: Annotated[tuple[Annotated[int, Field(ge=0)], ...], AfterValidator(each_once)] = ()
    """GPU indices that the campaign may use, each once; empty on a CPU."""
    interconnect: Interconnect = Interconnect.auto
    """How the GPUs reach each other; `auto` = read from this host. Declare it to render on a host without GPUs."""
    compute_capability: str | None = Field(None, pattern=CAPABILITY)
    """Compute capability of the GPUs, such as 12.0; empty = read from this host."""
    gpu_memory_gib: float | None = Field(None, gt=0)
    """Memory of one GPU in GiB, for estimates; empty = read from this host."""
    cpu_threads: int | None = Field(None, ge=1)
    """Threads per engine and trainer on a CPU; empty = all cores."""
    environments: Annotated[tuple[EngineEnvironment, ...], AfterValidator(each_once)] = ()
    """Engine environments that are not under `.venvs/`."""
    port: int | None = Field(None, ge=1024, le=65535)
    """Port of every server, on the loopback; empty = a free one."""
    ready_timeout_s: float = Field(600, gt=0)
    """Longest wait for the first real token after a launch, in seconds."""
    stop_grace_s: float = Field(10, gt=0)
    """Time between SIGTERM and SIGKILL when a server is stopped, in seconds."""

    def environment_of(self, arm: Arm) -> EngineEnvironment:
        """Engine environment of an arm: the declared one, else `.venvs/<engine>-<device>` of the project.

        The stub engine runs in the orchestrator's own interpreter. Raises ConfigError for an unknown name.
        """
        name = arm.environment or f"{arm.engine}-{self.device}"
        for environment in self.environments:
            if environment.name == name:
                return environment
        if arm.environment is not None and not (_PROJECT / ".venvs" / name).exists():
            known = ", ".join(e.name for e in self.environments) or "none"
            raise ConfigError(f"arms.{arm.name}.environment: no environment {name}; machine.environments has {known}")
        if arm.engine is EngineName.stub:
            return EngineEnvironment(name=name, python=sys.executable)
        return EngineEnvironment(name=name, python=str(_PROJECT / ".venvs" / name / "bin" / "python"))


class Tuning(Frozen):
    attention_backend: str | None = None
    """Attention backend by the engine's own name; empty = the engine chooses."""
    cuda_graph: bool | None = None
    """CUDA graphs for decoding; empty = the engine's default."""
    custom_all_reduce: bool | None = None
    """The engine's own all-reduce kernel; empty = by topology."""
    max_running_requests: int = Field(32, ge=1)
    """Cap on requests that run at once; always set explicitly, equal in all arms that are compared."""
    kv_tokens: int | None = Field(None, ge=64)
    """Size of the KV cache in tokens; empty = from memory."""
    kv_cache_gib: float | None = Field(None, gt=0)
    """Size of the KV cache in GiB (CPU engines); empty = the engine's default."""
    memory_fraction: float | None = Field(None, gt=0, lt=1)
    """Share of GPU memory for weights and KV cache; empty = the engine's default."""
    chunked_prefill_size: int | None = Field(None, ge=16)
    """Largest prefill chunk, in tokens; empty = the engine's default."""
    prefix_cache: bool = False
    """Reuse the KV cache of shared prompt prefixes; must be off for extraction."""
    tensor_parallel: int = Field(1, ge=1)
    """GPUs that share each layer."""
    nccl_profile: str = Field("none", pattern=NAME)
    """Named set of NCCL variables (none, single-gpu, nvlink, pcie-no-nvlink, p2p-off) or `auto`."""
    variables: Annotated[tuple[Variable, ...], AfterValidator(each_once)] = ()
    """Further environment variables for the server."""
    extra_args: tuple[str, ...] = ()
    """Further command line arguments, passed to the engine as they are."""


class Speculative(Frozen):
    drafter: str = "own"
    """`own` = the drafter trained in this campaign, or the folder of a published one."""
    extracted_on: EngineName = EngineName.vllm
    """Engine whose hidden states trained the drafter."""
    num_speculative_tokens: int = Field(3, ge=1, le=16)
    """Draft tokens per step (k)."""
    serving_probe: int = Field(0, ge=0)
    """Requests whose drafter calls are recorded inside the engine and compared with the stored states; 0 = off."""
    declared_experiment: bool = False
    """Allow serving on another engine than the states were extracted on; the report says so."""


class Arm(Frozen):
    name: str = Field(pattern=NAME)
    """Name of this server configuration, unique in the campaign."""
    engine: EngineName
    """Serving engine."""
    role: Role
    """What the arm is for: measure without speculation, extract hidden states, or measure speculation."""
    environment: str | None = None
    """Engine environment; empty = `<engine>-<device>`."""
    tuning: Tuning = Tuning()
    """Settings of the server."""
    speculative: Speculative | None = None
    """Speculative decoding, for speculative arms only."""
    side_by_side: str | None = Field(None, pattern=NAME)
    """Arms of one role with the same word here are up together, and their measurements take turns, so that no drift of
    the machine favours one of them. On a GPU each needs its share of the memory (tuning.memory_fraction)."""
    fault: StubFault | None = None
    """Stub engine only: the fault that it plays (launch, benchmark, extract, ...)."""

    @model_validator(mode="after")
    def _role_fits(self) -> Arm:
        if (self.role is Role.speculative) != (self.speculative is not None):
            raise ValueError("speculative arms need `speculative`, other arms must not have it")
        if self.role is Role.extraction and self.tuning.prefix_cache:
            raise ValueError("tuning.prefix_cache must be false for extraction: cached tokens have no states")
        if self.fault is not None and self.engine is not EngineName.stub:
            raise ValueError("`fault` is a setting of the stub engine only")
        spec = self.speculative
        if spec and spec.extracted_on is not self.engine and spec.drafter == "own" and not spec.declared_experiment:
            raise ValueError(
                f"serves on {self.engine} a drafter extracted on {spec.extracted_on}: "
                "set speculative.declared_experiment to true if that is the experiment"
            )
        return self
