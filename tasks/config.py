"""The whole campaign as one frozen model: the YAML file, the Prefect form and `--set` overrides.

The only layer number here is the Hugging Face `hidden_states` index: 0 = embeddings, k = residual
stream after k decoder layers, N = after the last layer before the final norm.
"""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from tasks.errors import ConfigError
from tasks.store.keys import content_key

_PROJECT = Path(__file__).resolve().parents[1]
NAME = r"^[a-z0-9][a-z0-9-]{0,39}$"


class Frozen(BaseModel):
    """Base of all config models: unknown keys are errors, values do not change."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


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


class WorkloadKind(StrEnum):
    prompts = "prompts"
    random = "random"


class Interconnect(StrEnum):
    auto = "auto"
    single = "single"
    nvlink = "nvlink"
    pcie = "pcie"


class Variable(Frozen):
    name: str = Field(pattern=r"^[A-Z_][A-Z0-9_]*$")
    """Name of the environment variable."""
    value: str
    """Its value, as text."""


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
    variables: tuple[Variable, ...] = ()
    """Environment variables that this environment needs (PYTHONPATH, CUDA_HOME, ...)."""


class Machine(Frozen):
    device: Device = Device.cpu
    """Where the engines run."""
    gpus: tuple[int, ...] = ()
    """GPU indices that the campaign may use; empty on a CPU."""
    interconnect: Interconnect = Interconnect.auto
    """How the GPUs reach each other; `auto` = read from this host. Declare it to render on a host without GPUs."""
    compute_capability: str | None = Field(None, pattern=r"^\d+\.\d$")
    """Compute capability of the GPUs, such as 12.0; empty = read from this host."""
    gpu_memory_gib: float | None = Field(None, gt=0)
    """Memory of one GPU in GiB, for estimates; empty = read from this host."""
    cpu_threads: int | None = Field(None, ge=1)
    """Threads per engine and trainer on a CPU; empty = all cores."""
    environments: tuple[EngineEnvironment, ...] = ()
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
    variables: tuple[Variable, ...] = ()
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
    """Arms with the same word here are up together so that their repeats alternate."""
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


class Workload(Frozen):
    name: str = Field(pattern=NAME)
    """Name of the load, unique in the campaign."""
    kind: WorkloadKind = WorkloadKind.prompts
    """Held-out prompts, or random token ids of fixed length."""
    input_tokens: int = Field(128, ge=1)
    """Prompt length of a random load, in tokens."""
    output_tokens: int = Field(96, ge=2)
    """Longest answer, in tokens."""
    ignore_eos: bool = False
    """Generate exactly `output_tokens` tokens."""
    concurrencies: tuple[int, ...] = (1, 8)
    """Requests in flight, one measurement each (closed loop)."""
    requests: int = Field(32, ge=1)
    """Requests per measurement; prompts are taken in order, and again from the start if they run out."""
    repeats: int = Field(1, ge=1)
    """Measurements per concurrency."""
    warmup_requests: int = Field(2, ge=0)
    """Requests before each measurement that are not counted."""
    timeout_s: float = Field(120, gt=0)
    """Longest time for one request, in seconds."""
    by_category: bool = False
    """Run each prompt category as a block of its own, so that acceptance is known per category."""


class Prompts(Frozen):
    train_file: str
    """JSON lines with the training prompts: `messages`, `prompt`, `question` or `turns`, and `category`."""
    heldout_file: str
    """JSON lines with the prompts of the benchmarks; they share no text with the training prompts."""
    train_samples: int = Field(256, ge=1)
    """Training prompts to use, from the start of the file."""
    heldout_samples: int = Field(32, ge=1)
    """Held-out prompts to use, from the start of the file."""
    max_prompt_tokens: int = Field(512, ge=8)
    """Longer prompts are dropped and counted."""


class Sampling(Frozen):
    temperature: float = Field(0.0, ge=0)
    """0 = greedy."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling share."""
    max_tokens: int = Field(128, ge=2)
    """Longest response, in tokens."""
    draws: int = Field(1, ge=1)
    """Responses per prompt."""
    concurrency: int = Field(16, ge=1)
    """Requests in flight while responses are generated or states extracted."""


class DrafterConfig(Frozen):
    name: str = Field("drafter", pattern=NAME)
    """Name of the drafter in tables and reports."""
    points: tuple[int, ...] = (1, 2, 3)
    """Three hidden_states indices (0 = embeddings, k = after k layers) whose states are fused."""
    draft_vocab_size: int = Field(1024, ge=2)
    """Tokens that the drafter can propose (draft vocabulary)."""
    unroll_steps: int = Field(4, ge=1, le=16)
    """Steps of the train-time-test unroll."""
    step_loss_decay: float = Field(0.8, gt=0, le=1)
    """Weight of unroll step k is this to the power k."""
    epochs: int = Field(8, ge=1)
    """Passes over the training samples."""
    batch_size: int = Field(8, ge=1)
    """Samples per optimizer step."""
    learning_rate: float = Field(1.5e-3, gt=0)
    """Peak learning rate (AdamW)."""
    warmup_steps: int = Field(20, ge=0)
    """Optimizer steps of linear warm-up before the cosine decay."""
    gradient_clip: float = Field(1.0, gt=0)
    """Largest gradient norm."""
    seed: int = 0
    """Seed of initialisation and sample order."""
    checkpoint_every_steps: int = Field(50, ge=1)
    """Optimizer steps between checkpoints."""

    @field_validator("points")
    @classmethod
    def _three_distinct(cls, points: tuple[int, ...]) -> tuple[int, ...]:
        if len(points) != 3 or len(set(points)) != 3 or min(points) < 0:
            raise ValueError(f"needs three distinct hidden_states indices from 0 on, got {list(points)}")
        return tuple(sorted(points))


class Thresholds(Frozen):
    state_rel_error: float = Field(1e-5, gt=0)
    """Largest relative error of captured states at the mapped point (1e-5 in fp32, 0.02 in bf16)."""
    next_best_rel_error: float = Field(0.2, ge=0)
    """Smallest relative error that the next-best index must have, so that the mapping is unambiguous."""
    align_samples: int = Field(8, ge=1)
    """Samples that align compares with a transformers forward."""
    max_nll_per_token: float = Field(4.0, gt=0)
    """Largest mean negative log-likelihood per response token under the target, in nats."""
    top2_margin: float = Field(1e-4, ge=0)
    """Greedy outputs may first differ only where the top-2 log-probability margin is at most this."""
    replay_gap: float = Field(0.02, gt=0)
    """Largest relative gap between replayed and served accept length."""
    min_accept_length: float = Field(1.05, ge=1)
    """Replay stops the campaign below this accept length: the drafter does not draft."""
    client_lag_ms: float = Field(50.0, gt=0)
    """A measurement whose client event loop lagged more than this (p99) is void."""


class Campaign(Frozen):
    """One campaign: serve, measure, extract, align, train, replay, and measure speculation."""

    name: str = Field(pattern=NAME)
    """Name of the campaign in tables, reports and run names."""
    target: Target
    """The model that is served."""
    machine: Machine = Machine()
    """Where and with which engine environments it runs."""
    arms: tuple[Arm, ...] = Field(min_length=1)
    """Server configurations, started one after another in this order."""
    workloads: tuple[Workload, ...] = Field(min_length=1)
    """Loads that every base and speculative arm is measured under."""
    prompts: Prompts
    """Training and held-out prompts."""
    sampling: Sampling = Sampling()
    """How the training responses are generated."""
    drafter: DrafterConfig = DrafterConfig()
    """The EAGLE-3 drafter and its training."""
    thresholds: Thresholds = Thresholds()
    """Limits at which a seam check stops the campaign."""
    strict: bool = True
    """Stop before the benchmark when a requested setting did not take effect."""

    @model_validator(mode="after")
    def _consistent(self) -> Campaign:
        for kind, names in (("arms", [a.name for a in self.arms]), ("workloads", [w.name for w in self.workloads])):
            twice = sorted({n for n in names if names.count(n) > 1})
            if twice:
                raise ValueError(f"{kind}: name used twice: {', '.join(twice)}")
        extracting = {a.engine for a in self.arms if a.role is Role.extraction}
        if extracting and not any(a.role is Role.base for a in self.arms):
            raise ValueError("arms: extraction needs a base arm, whose server generates the responses")
        for arm in self.arms:
            spec = arm.speculative
            if spec and spec.drafter == "own" and spec.extracted_on not in extracting:
                raise ValueError(f"arms: {arm.name} wants a drafter from {spec.extracted_on}, no arm extracts there")
        return self

    def arms_of(self, role: Role) -> tuple[Arm, ...]:
        """Arms of one role, in order."""
        return tuple(a for a in self.arms if a.role is role)

    @property
    def key(self) -> str:
        """Content key of the whole config."""
        return content_key(self.model_dump(mode="json"))
