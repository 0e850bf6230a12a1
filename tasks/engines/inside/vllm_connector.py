"""vLLM KV connector that stores hidden states: vLLM loads it by `kv_connector_module_path`.

A request asks for its states with `kv_transfer_params: {"drafthouse_sample_key": KEY}`; all others
pass untouched. The scheduler side keeps no state of running requests, so that aborted ones leak
nothing: it decides when a request finishes, hands it to the worker of rank 0 with the next step, and
its blocks are kept until that worker has copied them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

from tasks.engines.inside.vllm_capture import Pending, StateCapture, find_cache_layer

SAMPLE_KEY = "drafthouse_sample_key"
ANSWER = "drafthouse"
LONGEST_KEY = 256


@dataclass
class FinishedRequests(KVConnectorMetadata):
    """Scheduler to worker, with every step."""

    pending: list[Pending] = field(default_factory=list)


@dataclass
class CaptureFailure(KVConnectorWorkerMetadata):
    """Worker to scheduler, once the states writer has failed."""

    error: str

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        return self


class DrafthouseConnector(KVConnectorBase_V1, SupportsHMA):
    """Stores the states of finished requests that carry a sample key."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        if vllm_config.parallel_config.pipeline_parallel_size != 1:
            raise RuntimeError("drafthouse: state capture does not support pipeline parallelism")
        speculative = vllm_config.speculative_config
        if speculative is None or speculative.method != "extract_hidden_states":
            raise RuntimeError("drafthouse: state capture needs the speculative method extract_hidden_states")
        points = list(speculative.draft_model_config.hf_config.eagle_aux_hidden_state_layer_ids)
        if points != sorted(set(points)):
            # vLLM sorts and drops duplicates, so another order would mislabel the states.
            raise RuntimeError(f"drafthouse: points must be ascending and distinct, got {points}")
        self.points = points
        self.folder = Path(vllm_config.kv_transfer_config.get_from_extra_config("capture_dir", ""))
        self.max_tokens = int(vllm_config.model_config.max_model_len)
        self.error: str | None = None
        self._finished: list[Pending] = []
        self._capture: StateCapture | None = None

    # Scheduler

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Keep the blocks of a request that asked for its states; answer what will become of them."""
        asked = request.kv_transfer_params or {}
        if SAMPLE_KEY not in asked or str(request.get_finished_reason()) not in ("stop", "length"):
            return False, None
        key, refusal = asked[SAMPLE_KEY], self.error
        if not isinstance(key, str) or not 0 < len(key) <= LONGEST_KEY:
            refusal = f"{SAMPLE_KEY} must be a text of 1 to {LONGEST_KEY} characters"
        elif not request.prompt_token_ids:
            refusal = "a request without prompt token ids has no states to label"
        if refusal is not None:
            return False, {ANSWER: {"error": refusal}}
        token_ids = list(request.prompt_token_ids)
        self._finished.append(Pending(request.request_id, key, token_ids, tuple(list(ids) for ids in block_ids)))
        return True, {ANSWER: {"sample_key": key, "tokens": len(token_ids)}}

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        meta, self._finished = FinishedRequests(self._finished), []
        return meta

    def update_connector_output(self, connector_output: Any) -> None:
        failure = connector_output.kv_connector_worker_meta
        if isinstance(failure, CaptureFailure):
            self.error = failure.error

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        assert num_external_tokens == 0, "nothing is ever loaded"

    def get_finished_count(self) -> int:
        return 1  # rank 0 alone stores, so blocks are free when it says so

    # Worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if get_tensor_model_parallel_rank() == 0:
            layer = find_cache_layer(self._kv_cache_config)
            self._capture = StateCapture(self.folder, kv_caches[layer.name], layer, self.points, self.max_tokens)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if self._capture is None:
            return None, None
        if self.has_connector_metadata():
            meta = self._get_connector_metadata()
            assert isinstance(meta, FinishedRequests)
            for pending in meta.pending:
                self._capture.start(pending)
        return self._capture.poll() or None, None

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        failed = self._capture is not None and self._capture.error is not None
        return CaptureFailure(str(self._capture.error)) if self._capture and failed else None

    def shutdown(self) -> None:
        if self._capture is not None:
            self._capture.close()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        return

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        return

    def wait_for_save(self) -> None:
        return
