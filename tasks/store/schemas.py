"""One declared Arrow schema per table: what every reader may rely on.

Times are UTC microseconds, counts are exact integers, a missing measurement is null (never 0 or
NaN) and the column `note`, `detail` or `reason` beside it says why. Every table carries `run`, its
Hive partition, as its last column when read through `tables.Store.read`.
"""

from __future__ import annotations

from typing import Final

import pyarrow as pa

SCHEMA_VERSION: Final = 1

TEXT = pa.string()
COUNT = pa.int64()
REAL = pa.float64()
FLAG = pa.bool_()
TIME = pa.timestamp("us", tz="UTC")


def _schema(**columns: pa.DataType) -> pa.Schema:
    metadata = {"drafthouse_schema": str(SCHEMA_VERSION)}
    return pa.schema([pa.field(name, kind) for name, kind in columns.items()], metadata=metadata)


_REUSE = {"reused_from": TEXT}  # run id of the run that did the work; null when it was done in this run

TABLES: Final[dict[str, pa.Schema]] = {
    "runs": _schema(
        run_id=TEXT, campaign=TEXT, started_at=TIME, finished_at=TIME, state=TEXT, config_key=TEXT,
        config_json=TEXT, versions_json=TEXT, machine_json=TEXT, note=TEXT,
    ),
    "servers": _schema(
        arm=TEXT, engine=TEXT, load=COUNT, setting=TEXT, engine_setting=TEXT, requested=TEXT, effective=TEXT,
        source=TEXT, status=TEXT, detail=TEXT,
    ),
    "requests": _schema(
        arm=TEXT, workload=TEXT, category=TEXT, concurrency=COUNT, repeat=COUNT, request_id=TEXT,
        prompt_key=TEXT, scheduled_at=TIME, sent_at=TIME, ttft_ms=REAL, first_content_ms=REAL, tpot_ms=REAL,
        tpot_ms_n1=REAL, chunk_gap_ms_p50=REAL, e2e_ms=REAL, prompt_tokens=COUNT, completion_tokens=COUNT,
        first_chunk_tokens=COUNT, chunks=COUNT, token_source=TEXT, status=TEXT, finish_reason=TEXT,
        spec_accept_length=REAL, detail=TEXT,
    ),
    "benchmarks": _schema(
        arm=TEXT, engine=TEXT, workload=TEXT, concurrency=COUNT, repeat=COUNT, requests_ok=COUNT,
        requests_failed=COUNT, failures_json=TEXT, output_tok_s=REAL, steady_output_tok_s=REAL,
        decode_tok_s=REAL,
        ttft_ms_p50=REAL, ttft_ms_p90=REAL, ttft_ms_p99=REAL,
        tpot_ms_p50=REAL, tpot_ms_p90=REAL, tpot_ms_p99=REAL, tpot_ms_n1_p50=REAL,
        e2e_ms_p50=REAL, e2e_ms_p90=REAL, e2e_ms_p99=REAL,
        client_lag_ms_p99=REAL, wall_s=REAL, prefix_hit_share=REAL, running_requests_peak=COUNT,
        running_requests_cap=COUNT, distinct_4gram_share=REAL, valid=FLAG, comparable=FLAG, note=TEXT,
    ),
    "acceptance": _schema(
        arm=TEXT, engine=TEXT, drafter=TEXT, extracted_on=TEXT, workload=TEXT, concurrency=COUNT, repeat=COUNT,
        num_speculative_tokens=COUNT, category=TEXT, position=COUNT, drafts=COUNT, accepted=COUNT,
        accept_rate=REAL, accept_length=REAL, source=TEXT, reason=TEXT,
    ),
    "responses": _schema(
        sample_key=TEXT, draw=COUNT, prompt_key=TEXT, category=TEXT, messages_json=TEXT,
        token_ids=pa.list_(pa.int32()), prompt_tokens=COUNT, finish_reason=TEXT, nll_per_token=REAL, **_REUSE,
    ),
    "states_index": _schema(
        sample_key=TEXT, state_key=TEXT, shard=TEXT, row_group=COUNT, tokens=COUNT,
        points=pa.list_(pa.int32()), dtype=TEXT, bytes=COUNT, checksum=TEXT, **_REUSE,
    ),
    "alignment": _schema(
        check=TEXT, subject=TEXT, value=REAL, threshold=REAL, passed=FLAG, detail=TEXT, **_REUSE,
    ),
    "training": _schema(
        drafter=TEXT, step=COUNT, tokens=COUNT, loss=REAL, accuracy_json=TEXT, lr=REAL, tok_s=REAL, **_REUSE,
    ),
    "replay": _schema(
        drafter=TEXT, workload=TEXT, category=TEXT, position=COUNT, drafts=COUNT, accepted=COUNT, accept_rate=REAL,
        accept_length=REAL, auxiliary=TEXT, **_REUSE,
    ),
    "cleanup": _schema(
        arm=TEXT, kind=TEXT, what=TEXT, proof=TEXT, action=TEXT, bytes=COUNT, detail=TEXT,
    ),
    "stages": _schema(
        stage=TEXT, arm=TEXT, started_at=TIME, finished_at=TIME, wall_s=REAL, cpu_s=REAL, loads=COUNT,
        requests=COUNT, executed=COUNT, reused=COUNT, detail=TEXT,
    ),
    "losslessness": _schema(
        arm=TEXT, base_arm=TEXT, workload=TEXT, category=TEXT, prompt_key=TEXT, identical=FLAG,
        first_difference=COUNT, top2_margin=REAL, verdict=TEXT,
    ),
    "verdicts": _schema(
        metric=TEXT, arm=TEXT, workload=TEXT, concurrency=COUNT, baseline_runs=COUNT, expected=REAL, observed=REAL,
        change_pct=REAL, p_value=REAL, verdict=TEXT, suspects_json=TEXT,
    ),
}
