"""EAGLE drafting along one chain (topk 1) and greedy verification, in torch.

A step drafts k tokens one after another; the target then sees [last token, draft 1 .. draft k] in one
pass and keeps the longest prefix that it would have chosen itself, plus one token of its own. With
one chain the tree of SGLang's kernels is a list, and its mask the ordinary causal one.

Shapes: B requests, N = k + 1 tokens to verify per request.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.plugins.hook_registry import HookType

from tasks.engines.inside.sglang_hooks import Hook

OPS = "sglang.kernels.ops.speculative"


def build_chain(
    parent_list: Any, top_scores_index: Any, seq_lens: torch.Tensor, tree_mask: Any, positions: torch.Tensor,
    retrieve_index: torch.Tensor, retrieve_next_token: torch.Tensor, retrieve_next_sibling: torch.Tensor,
    topk: int, spec_steps: int, num_verify_tokens: int, tree_mask_mode: Any,
) -> None:
    """Fill the tree buffers [B, N] for a chain: token j is followed by j + 1, the last by none (-1)."""
    if topk != 1:
        raise NotImplementedError(f"drafthouse CPU platform drafts one chain: topk is {topk}, set it to 1")
    n = num_verify_tokens
    place = torch.arange(n)
    positions.copy_((seq_lens.view(-1, 1).long() + place).view(-1))
    retrieve_index.copy_(torch.arange(seq_lens.numel() * n).view(-1, n))
    following = torch.where(place == n - 1, -1, place + 1)
    retrieve_next_token.copy_(following.expand(seq_lens.numel(), n))
    retrieve_next_sibling.fill_(-1)


def verify_chain(
    predicts: torch.Tensor, accept_index: torch.Tensor, accept_token_num: torch.Tensor, candidates: torch.Tensor,
    retrieve_index: Any, retrieve_next_token: Any, retrieve_next_sibling: Any, target_predict: torch.Tensor,
    topk: int = -1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Accept drafts while they equal the target's own choice.

    candidates, target_predict [B, N]; draft j + 1 is right if it equals target_predict[:, j].
    Writes accept_index [B, N'] (-1 after the last accepted), accept_token_num [B], predicts [B * N].
    """
    batch, n = candidates.shape
    agrees_BK = candidates[:, 1:] == target_predict[:, :-1].to(candidates.dtype)
    accepted_B = agrees_BK.long().cumprod(dim=1).sum(dim=1).clamp_(max=accept_index.shape[1] - 1)
    place = torch.arange(accept_index.shape[1])
    rows = torch.arange(batch).view(-1, 1) * n + place
    accept_index.copy_(torch.where(place <= accepted_B.view(-1, 1), rows, -1))
    accept_token_num.copy_(accepted_B)
    predicts[: batch * n].copy_(target_predict.reshape(-1))
    return predicts, accept_index, accept_token_num


def draft_slots(
    req_pool_indices: torch.Tensor, req_to_token: torch.Tensor, seq_lens: torch.Tensor, out_cache_loc: torch.Tensor,
    topk: int, num_cols: int, positions: torch.Tensor | None = None, mrope: torch.Tensor | None = None,
) -> None:
    """KV slots of the next `num_cols` tokens of each request, into out_cache_loc [B * num_cols]."""
    columns = seq_lens.view(-1, 1).long() + torch.arange(topk * num_cols)
    out_cache_loc.copy_(req_to_token[req_pool_indices.view(-1, 1).long(), columns].view(-1))
    if positions is not None:
        positions.copy_(seq_lens)
    if mrope is not None:
        raise NotImplementedError("drafthouse CPU platform: multimodal positions are not supported while drafting")


def window_slots(
    *, req_pool_indices: torch.Tensor, req_to_token: torch.Tensor, start_offset: torch.Tensor,
    end_offset: torch.Tensor, batch_size: int, draft_token_num: int, device: Any,
) -> torch.Tensor:
    """KV slots of tokens start_offset .. end_offset of each request, one after another (int64)."""
    windows = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    return torch.cat([req_to_token[pool, start:end] for pool, start, end in windows]).long()


def assign_slots(
    req_pool_indices: torch.Tensor, req_to_token: torch.Tensor, start_offset: torch.Tensor,
    end_offset: torch.Tensor, out_cache_loc: torch.Tensor, batch_size: int,
) -> None:
    """Write newly allocated KV slots into the table of each request."""
    taken = 0
    for pool, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True):
        req_to_token[pool, start:end] = out_cache_loc[taken : taken + end - start].to(req_to_token.dtype)
        taken += end - start


def last_accepted(
    accept_tokens: torch.Tensor, accept_lens: torch.Tensor, bonus_tokens: torch.Tensor, accept_stride: int,
    batch_size: int,
) -> None:
    """The target's own token that ends each accepted run, into bonus_tokens [B]."""
    runs = accept_tokens.reshape(batch_size, accept_stride)
    bonus_tokens.copy_(runs.gather(1, accept_lens.view(-1, 1).long() - 1).view(-1))


def extend_or_verify(
    original: Callable[..., Any], self: TorchNativeAttnBackend, q: Any, k: Any, v: Any, layer: Any,
    forward_batch: Any, save_kv_cache: bool = True, **kwargs: Any,
) -> Any:
    """Verification is a prefill of N tokens behind seq_lens, which this backend's extend does not know."""
    if not forward_batch.forward_mode.is_target_verify():
        return original(self, q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
    n = forward_batch.spec_info.draft_token_num
    kept = forward_batch.seq_lens, forward_batch.extend_prefix_lens, forward_batch.extend_seq_lens
    forward_batch.extend_prefix_lens = forward_batch.seq_lens
    forward_batch.extend_seq_lens = torch.full_like(forward_batch.seq_lens, n)
    forward_batch.seq_lens = forward_batch.seq_lens + n
    try:
        return original(self, q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
    finally:
        forward_batch.seq_lens, forward_batch.extend_prefix_lens, forward_batch.extend_seq_lens = kept


class DraftStepBackend(TorchNativeAttnBackend):
    """Attention of draft step `step`, which sees step + 1 tokens more than the batch says."""

    def __init__(self, runner: Any, step: int) -> None:
        super().__init__(runner)
        self.step = step
        self.prefill_attention_backend_str = self.decode_attention_backend_str = "torch_native"

    def forward_decode(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **kwargs: Any
    ) -> Any:
        kept = forward_batch.seq_lens
        forward_batch.seq_lens = kept + (self.step + 1)
        try:
            return super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
        finally:
            forward_batch.seq_lens = kept


class DraftStepsBackend:
    """One backend per draft step after the first, as the drafting loop expects it."""

    def __init__(self, runner: Any, steps: int) -> None:
        self.attn_backends = [DraftStepBackend(runner, step) for step in range(steps - 1)]
        self.prefill_attention_backend_str = self.decode_attention_backend_str = "torch_native"

    def init_forward_metadata(self, forward_batch: Any) -> None:
        for backend in self.attn_backends:
            backend.init_forward_metadata(forward_batch)


def steps_backend(self: Any) -> DraftStepsBackend | None:
    """Of DraftBackendFactory: backends of the draft steps; None with a single step."""
    if self.speculative_num_steps <= 1:
        return None
    return DraftStepsBackend(self.draft_model_runner, self.speculative_num_steps)


def extend_backend(self: Any) -> TorchNativeAttnBackend:
    """Of DraftBackendFactory: backend of the drafter's own prefill."""
    backend = TorchNativeAttnBackend(self.draft_model_runner)
    backend.prefill_attention_backend_str = backend.decode_attention_backend_str = "torch_native"
    return backend


def refuse_sampling(original: Callable[..., Any], self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    """Of TokenizerManager: HTTP 400 for temperature > 0 on a speculative server.

    Verification here knows the target's best token only, and would answer greedily without a word.
    """
    sampling = request.sampling_params if isinstance(request.sampling_params, dict) else {}
    greedy = sampling.get("temperature", 1.0) == 0 or sampling.get("top_k") == 1
    if self.server_args.speculative_algorithm and not greedy:
        raise ValueError("drafthouse CPU platform: speculation is greedy only; send temperature 0, or use a base arm")
    return original(self, request, *args, **kwargs)


def _replace(target: str, function: Callable[..., Any]) -> Hook:
    return Hook(target, function, HookType.REPLACE)


HOOKS = [
    _replace(f"{OPS}.spec_tree.build_tree_kernel_efficient_func", build_chain),
    _replace(f"{OPS}.spec_tree.verify_tree_greedy_func", verify_chain),
    _replace(f"{OPS}.cache_locs.assign_draft_cache_locs_contiguous_func", draft_slots),
    _replace(f"{OPS}.eagle.fill_bonus_tokens_func", last_accepted),
    _replace("sglang.srt.mem_cache.allocation.assign_req_to_token_pool_func", assign_slots),
    _replace("sglang.srt.speculative.draft_utils.DraftBackendFactory.create_decode_backend", steps_backend),
    _replace("sglang.srt.speculative.draft_utils.DraftBackendFactory.create_draft_extend_backend", extend_backend),
    Hook(
        "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend.forward_extend",
        extend_or_verify, HookType.AROUND,
    ),
    Hook(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request", refuse_sampling,
        HookType.AROUND,
    ),
    # Warms up a Triton kernel that only moves cache slots between places, which one chain never needs.
    _replace("sglang.srt.mem_cache.memory_pool.MHATokenToKVPool._init_kv_copy_and_warmup", lambda self: None),
]
