"""What an answer's stream says, on fixtures whose right values were worked out by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tasks.engines.stub import StubEngine
from tasks.load.metrics import request_metrics, span, steady_span
from tasks.load.recorder import Record, Request
from tasks.load.stream import AnswerReader, SseDecoder

DONE = "[DONE]"


def completion(text: str = "", ids: list[int] | None = None, finish: str | None = None, **more: Any) -> str:
    choice: dict[str, Any] = {"index": 0, "text": text, "finish_reason": finish}
    return json.dumps({"choices": [choice if ids is None else {**choice, "token_ids": ids}], **more})


def chat(finish: str | None = None, **delta: Any) -> str:
    return json.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})


def usage(prompt: int, tokens: int) -> str:
    return json.dumps({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": tokens}})


def read(*events: tuple[float, str]) -> AnswerReader:
    reader = AnswerReader(StubEngine())
    for at, data in events:
        reader.feed(data, at)
    return reader


def record(answer: AnswerReader, sent: float = 0.0, ended: float | None = None, key: str = "k") -> Record:
    from datetime import UTC, datetime

    status, detail = answer.outcome()
    end = ended if ended is not None else (answer.chunks[-1].at if answer.chunks else sent)
    return Record(Request("r", key, None, (1,), {}), sent, datetime.now(UTC), end, status, detail, answer)


def test_reasoning_is_the_first_token_and_content_has_a_time_of_its_own() -> None:
    answer = read(
        (0.05, chat(role="assistant", content="")), (0.1, chat(reasoning_content="Hm")), (1.0, chat(reasoning="so")),
        (2.0, chat(content="Yes")), (2.1, chat(finish="stop")), (2.1, usage(1, 3)), (2.1, DONE),
    )
    metrics = request_metrics(record(answer))
    assert metrics["ttft_ms"] == pytest.approx(100)
    assert metrics["first_content_ms"] == pytest.approx(2000)
    assert answer.outcome() == ("ok", None)
    assert len(answer.chunks) == 3, "role-only, empty and usage-only chunks are no tokens"


def test_stream_of_a_tool_call_only_has_tokens_but_no_content() -> None:
    call = {"index": 0, "function": {"name": "look", "arguments": ""}}
    more = {"index": 0, "function": {"arguments": '{"a": 1}'}}
    answer = read(
        (0.1, chat(role="assistant", content=None)), (0.3, chat(tool_calls=[call])), (0.5, chat(tool_calls=[more])),
        (0.6, chat(finish="tool_calls")), (0.6, DONE),
    )
    metrics = request_metrics(record(answer))
    assert metrics["ttft_ms"] == pytest.approx(300)
    assert metrics["first_content_ms"] is None
    assert answer.outcome()[0] == "ok"


def ten_chunks_of_three(with_usage: bool, ids: bool = True) -> AnswerReader:
    events = [
        (1.0 + 0.1 * i, completion("abc", [3 * i, 3 * i + 1, 3 * i + 2] if ids else None, "stop" if i == 9 else None))
        for i in range(10)
    ]
    if with_usage:
        events.append((1.9, usage(1, 30)))
    return read(*events, (1.9, DONE))


def test_thirty_tokens_in_ten_chunks_divide_by_27_and_beside_it_by_29() -> None:
    answer = ten_chunks_of_three(with_usage=True)
    metrics = request_metrics(record(answer))
    assert answer.completion_tokens == (30, "server")
    assert answer.first_chunk_tokens == 3
    assert metrics["tpot_ms"] == pytest.approx(900 / 27)
    assert metrics["tpot_ms_n1"] == pytest.approx(900 / 29)
    assert metrics["chunk_gap_ms_p50"] == pytest.approx(100)
    assert metrics["e2e_ms"] == pytest.approx(1900)


def test_without_usage_the_client_counts_and_says_so() -> None:
    assert ten_chunks_of_three(with_usage=False).completion_tokens == (30, "client")
    assert ten_chunks_of_three(with_usage=False, ids=False).completion_tokens == (10, "client")


def test_unknown_size_of_the_first_chunk_leaves_tpot_null_and_not_wrong() -> None:
    answer = ten_chunks_of_three(with_usage=True, ids=False)
    assert answer.first_chunk_tokens is None
    metrics = request_metrics(record(answer))
    assert metrics["tpot_ms"] is None
    assert metrics["tpot_ms_n1"] == pytest.approx(900 / 29)


def test_as_many_chunks_as_tokens_means_one_token_each() -> None:
    answer = read((1.0, completion("a")), (1.2, completion("b", finish="length")), (1.2, usage(1, 2)), (1.2, DONE))
    assert answer.first_chunk_tokens == 1
    assert request_metrics(record(answer))["tpot_ms"] == pytest.approx(200)


def test_usage_in_every_chunk_tells_each_chunks_tokens() -> None:
    told = [{"prompt_tokens": 1, "completion_tokens": n} for n in (2, 5, 6)]
    answer = read(
        (1.0, completion("ab", usage=told[0])), (1.5, completion("cde", usage=told[1])),
        (1.6, completion("f", finish="stop", usage=told[2])), (1.6, DONE),
    )
    assert [c.tokens for c in answer.chunks] == [2, 3, 1]
    assert request_metrics(record(answer))["tpot_ms"] == pytest.approx(600 / 4)


def test_token_without_text_counts_as_a_token() -> None:
    answer = read((1.0, completion("", [7])), (1.1, completion("é", [8], "stop")), (1.1, usage(1, 2)), (1.1, DONE))
    assert [c.at for c in answer.chunks] == [1.0, 1.1]
    assert answer.token_ids == [7, 8]


@pytest.mark.parametrize(
    ("events", "status"),
    [
        ([completion("a", [1]), completion("b", [2], "stop")], "truncated"),  # no [DONE]
        ([completion("a", [1]), DONE], "truncated"),  # no finish reason
        ([completion("a", [1]), completion("b", [2], "abort"), DONE], "truncated"),
        ([], "truncated"),
        ([chat(role="assistant"), chat(finish="stop"), usage(1, 0), DONE], "empty"),
        ([completion("a", [1]), json.dumps({"error": {"message": "boom"}})], "http_error"),
        ([completion("a", [1]), "{half"], "http_error"),
        ([completion("a", [1], "stop"), DONE], "ok"),
    ],
)
def test_only_a_stream_with_tokens_finish_reason_and_end_mark_is_ok(events: list[str], status: str) -> None:
    answer = read(*((1.0, e) for e in events))
    assert answer.outcome()[0] == status


def test_a_cut_answer_has_a_first_token_but_no_time_per_token() -> None:
    metrics = request_metrics(record(read((0.5, completion("a", [1])), (0.9, completion("b", [2])))))
    assert metrics["ttft_ms"] == pytest.approx(500)
    assert metrics["tpot_ms"] is None and metrics["tpot_ms_n1"] is None and metrics["e2e_ms"] is None


def test_count_that_disagrees_with_the_ids_is_told() -> None:
    status, detail = read((1.0, completion("a", [1], "stop")), (1.0, usage(1, 2)), (1.0, DONE)).outcome()
    assert status == "ok" and detail == "server counted 2 tokens, stream carried 1 token ids"


def test_events_are_the_same_however_the_network_cuts_the_bytes() -> None:
    text = ': ping\n\ndata: {"t":\r\ndata: "é"}\r\n\r\nevent: x\ndata: [DONE]\n\ndata: never ended'.encode()
    for size in range(1, len(text) + 1):
        decoder = SseDecoder()
        found = [d for i in range(0, len(text), size) for d in decoder.feed(text[i : i + size])]
        assert found == ['{"t":\n"é"}', "[DONE]"], size


def test_throughput_from_first_send_to_last_end_and_over_the_steady_window() -> None:
    # Two slots: A 0..4 s, B 0..2 s, then C 2..4.5 s; two in flight from 0 to 4 s (a moment at 2 s aside).
    def answer(*times: float) -> AnswerReader:
        events = [(t, completion("x", [1, 2], "stop" if t == times[-1] else None)) for t in times]
        return read(*events, (times[-1], usage(1, 2 * len(times))), (times[-1], DONE))

    records = [
        record(answer(1.0, 2.0, 4.0), 0.0, 4.0), record(answer(1.0, 2.0), 0.0, 2.0),
        record(answer(3.0, 4.5), 2.0, 4.5),
    ]
    assert span(records) == (14, 4.5)
    assert steady_span(records) == (12, 4.0)  # the chunk at 4.5 s is outside


def test_failed_answers_give_no_throughput() -> None:
    records = [record(read((1.0, completion("a", [1]))))]
    assert span(records) == (0, 0.0)
    assert steady_span(records) is None
