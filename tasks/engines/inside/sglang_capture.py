"""Hidden states of prompts, captured inside SGLang's scheduler process.

A request asks for its states by `sampling_params.custom_params.drafthouse_sample_key`; requests
without it (health checks, warm-up) are left alone. States are taken where SGLang itself hands them
to a drafter, plus the residual stream as it enters the final norm, and are written by a thread:
the scheduler only keeps references (CPU) or queues copies on a side stream (CUDA).

What is known of a request hangs on SGLang's own request object, so that an aborted one leaves nothing
behind, and a retracted one is not captured twice. T = tokens of a batch, D = width, P = points.
"""

from __future__ import annotations

import json
import logging
import os
import weakref
from collections.abc import Callable
from http import HTTPStatus
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookType
from sglang.srt.runtime_context import get_parallel

from tasks.engines.inside import sglang_hooks
from tasks.engines.inside.sglang_hooks import Hook
from tasks.engines.inside.sglang_plugin import CAPTURE_VERSION, SAMPLE_KEY
from tasks.engines.inside.sglang_states import Progress, Staged, StatesWriter

LONGEST_KEY = 256
logger = logging.getLogger(__name__)
_capture: Capture | None = None  # one per scheduler process, made when its target is loaded
_folder: Path = Path()
_points: tuple[int, ...] = ()


def register(folder: str, points: str) -> None:
    """Register the hooks; `points` are Hugging Face indices below the last one, which is always added."""
    global _folder, _points
    _folder = Path(folder)
    _points = tuple(sorted({int(point) for point in points.split(",") if point}))
    sglang_hooks.register(HOOKS)


class Capture:
    """Capture of one target; every tensor-parallel rank keeps count, rank 0 writes."""

    def __init__(self, model: Any, folder: Path, points: tuple[int, ...], dtype: str) -> None:
        if get_parallel().pp_size > 1:
            raise RuntimeError("drafthouse capture: pipeline parallelism is not supported; use tensor parallelism")
        hooks = sglang_hooks.require(HOOKS)
        decoder = getattr(model, "language_model", model).model
        self.num_layers = int(decoder.config.num_hidden_layers)
        self.points = [*(p for p in points if p < self.num_layers), self.num_layers]
        set_points(model, decoder, self.points[:-1])
        decoder.norm.register_forward_hook(self._on_final_norm)
        self._before_norm_TD: torch.Tensor | None = None
        self._wanted: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()  # by request id
        self._ranks = int(get_parallel().tp_size)
        self._writer = StatesWriter(folder, self.points) if get_parallel().tp_rank == 0 else None
        if self._writer is not None:
            report(folder, self.points, hooks, dtype)

    def admit(self, requests: list[Any], prefixes: list[int]) -> None:
        """Note the requests of a prefill batch that want their states; fails those that cannot have them."""
        wanted = [(r, p) for r, prefix in zip(requests, prefixes, strict=True) if (p := _progress(r, prefix))]
        if not wanted:
            return
        reason = self._writer.failure() if self._writer else None
        if self._ranks > 1:  # ranks that disagree about a request would wait for each other for ever
            from sglang.srt.distributed import get_tp_group

            reason = get_tp_group().broadcast_object(reason, src=0)
        for request, progress in wanted:
            if reason is not None:
                _fail(request, progress, reason)
            else:
                self._wanted[request.rid] = request

    def stage(self, forward_batch: Any, auxiliary: Any) -> None:
        """Take the states of a prefill batch's wanted rows, in the order of the batch."""
        before_norm_TD, self._before_norm_TD = self._before_norm_TD, None
        rows, start = [], 0
        lengths = zip(
            forward_batch.rids, forward_batch.extend_prefix_lens_cpu, forward_batch.extend_seq_lens_cpu, strict=True
        )
        for rid, prefix, length in lengths:
            request = self._wanted.get(rid)
            if request is not None and prefix == request.drafthouse.captured:
                rows.append((request, start, min(length, request.drafthouse.missing)))
            start += length
        if not rows:
            return
        if before_norm_TD is None or auxiliary is None or before_norm_TD.shape[0] < start:
            raise RuntimeError(
                "drafthouse capture: the forward gave no hidden states for this batch; prefill must run eagerly "
                "(no prefill CUDA graphs) and with whole hidden states on each rank"
            )
        states = [*_split(auxiliary, len(self.points) - 1), before_norm_TD]
        # Not the ids that the logits processor is given: multimodal wrappers give it none.
        staged = Staged(states, forward_batch.input_ids) if self._writer is not None else None
        for request, first, length in rows:
            progress: Progress = request.drafthouse
            progress.add(staged, first, length)
            if progress.missing == 0:
                self._wanted.pop(request.rid, None)
                if self._writer is not None:
                    self._writer.put(progress)

    def _on_final_norm(self, module: torch.nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        # Called as norm(x), or as norm(x, residual), which returns the sum of both beside the normed one.
        self._before_norm_TD = output[1] if isinstance(output, tuple) else inputs[0]


def set_points(model: Any, decoder: Any, points: list[int]) -> None:
    """Have the model hand out the input of decoder layer p for each point p.

    Model classes read explicit ids in different ways, so the ids are tried until the decoder itself
    says that it taps `points`. Raises RuntimeError for a class without this capture.
    """
    if not hasattr(model, "set_eagle3_layers_to_capture"):
        raise RuntimeError(f"drafthouse capture: {type(model).__name__} of this SGLang hands out no auxiliary states")
    for ids in ([p - 1 for p in points], points, points[1:] + points[:1]):
        model.set_eagle3_layers_to_capture(list(ids))
        if sorted(getattr(decoder, "layers_to_capture", [])) == points:
            return
    raise RuntimeError(
        f"drafthouse capture: {type(model).__name__} cannot tap {points}; it says {decoder.layers_to_capture}"
    )


def report(folder: Path, points: list[int], hooks: dict[str, bool], dtype: str) -> None:
    """Write capture-<pid>.json: the proof, for whoever started the server, that capture is on."""
    facts = {
        "plugin": "drafthouse", "version": CAPTURE_VERSION, "project_version": version("drafthouse"),
        "engine": "sglang", "engine_version": version("sglang"), "points": points, "last_point": "before final norm",
        "dtype": dtype, "hooks": hooks, "pid": os.getpid(),
    }
    path = folder / f"capture-{os.getpid()}.json"
    scratch = path.with_suffix(".tmp")
    scratch.write_text(json.dumps(facts, indent=1))
    scratch.replace(path)
    logger.info(
        "drafthouse capture %s is on: points %s, %d hooks took, report %s",
        CAPTURE_VERSION, points, len(hooks), path.name,
    )


def _progress(request: Any, prefix: int) -> Progress | None:
    """Progress of a request that wants states and still misses some; None for all others."""
    progress: Progress | None = getattr(request, "drafthouse", None)
    if progress is None:
        asked = request.sampling_params.custom_params or {}
        if SAMPLE_KEY not in asked or request.to_finish is not None:
            return None
        key = asked[SAMPLE_KEY]
        progress = request.drafthouse = Progress(str(key), list(request.origin_input_ids))
        if not isinstance(key, str) or not 1 <= len(key) <= LONGEST_KEY:
            _fail(request, progress, f"{SAMPLE_KEY} must be a text of 1 to {LONGEST_KEY} characters")
    if progress.missing == 0 or progress.failed:
        return None
    if prefix == 0:
        progress.restart()
    if prefix != progress.captured:
        _fail(request, progress, "cached prompt tokens have no hidden states; start the server without prefix cache")
        return None
    return progress


def _fail(request: Any, progress: Progress, reason: str) -> None:
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    progress.fail()
    logger.error("drafthouse capture: a request fails: %s", reason)
    request.to_finish = FINISH_ABORT(f"hidden states: {reason}", HTTPStatus.INTERNAL_SERVER_ERROR, "CaptureFailed")


def _split(auxiliary: torch.Tensor | list[torch.Tensor], count: int) -> list[torch.Tensor]:
    """One [T, D] per point, from a list or one packed [T, count * D]."""
    parts = list(auxiliary.chunk(count, dim=-1)) if isinstance(auxiliary, torch.Tensor) else list(auxiliary)
    if len(parts) != count:
        raise RuntimeError(f"drafthouse capture: {len(parts)} auxiliary states for {count} points")
    return parts


def _on_load(result: Any, runner: Any) -> None:
    global _capture
    if not runner.is_draft_worker:
        _capture = Capture(runner.model, _folder, _points, str(runner.dtype).removeprefix("torch."))


def _on_batch(original: Callable[..., Any], cls: type, batch: Any, runner: Any, *args: Any, **kwargs: Any) -> Any:
    forward_batch = original(cls, batch, runner, *args, **kwargs)
    if _capture is not None and forward_batch.forward_mode.is_extend_without_speculative():
        _capture.admit(batch.reqs, forward_batch.extend_prefix_lens_cpu)
    return forward_batch


def _on_logits(
    original: Callable[..., Any], self: Any, input_ids: Any, hidden_states: Any, lm_head: Any, batch: Any,
    aux_hidden_states: Any = None, *args: Any, **kwargs: Any,
) -> Any:
    if _capture is not None and getattr(batch, "rids", None) and batch.forward_mode.is_extend_without_speculative():
        _capture.stage(batch, aux_hidden_states)
    return original(self, input_ids, hidden_states, lm_head, batch, aux_hidden_states, *args, **kwargs)


HOOKS = [
    Hook("sglang.srt.model_executor.model_runner.ModelRunner.load_model", _on_load, HookType.AFTER),
    Hook("sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new", _on_batch, HookType.AROUND),
    Hook("sglang.srt.layers.logits_processor.LogitsProcessor.forward", _on_logits, HookType.AROUND),
]
