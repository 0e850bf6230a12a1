"""A campaign on the stub engine that takes seconds, and the journal of what its servers answered."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from tasks.campaign_file import load_campaign

ROOT = Path(__file__).resolve().parents[1]
STUB = ROOT / "deployments" / "campaigns" / "stub.yaml"


class StubCampaign:
    """`file` is a campaign file with absolute paths; `broken` is a file while which streamed requests fail."""

    def __init__(self, folder: Path, *, step_s: float = 0.0, samples: int = 8) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.file, self.journal, self.broken = folder / "small.yaml", folder / "journal.jsonl", folder / "broken"
        data: dict[str, Any] = load_campaign(STUB).model_dump(mode="json")
        data["name"] = "small"
        data["workloads"] = [data["workloads"][0] | {"concurrencies": [1, 2], "requests": 4, "by_category": False}]
        data["prompts"] |= {"train_samples": samples, "heldout_samples": 4}
        data["drafter"] |= {"epochs": 2, "batch_size": 4, "checkpoint_every_steps": 1}
        for arm in data["arms"]:
            options = ["--journal", str(self.journal), "--step-s", str(step_s)]
            if arm["role"] == "speculative":
                options += ["--broken-while", str(self.broken)]
            arm["tuning"]["extra_args"] = options
        self.file.write_text(yaml.safe_dump(data))

    def answered(self) -> list[dict[str, Any]]:
        """Journal lines, oldest first, without the probes of a server that starts."""
        if not self.journal.exists():
            return []
        lines = [json.loads(line) for line in self.journal.read_text().splitlines()]
        return [line for line in lines if line["stream"] or line["logprobs"] or line["sample_key"]]

    def generated(self) -> list[tuple[int, ...]]:
        """Prompts whose responses were generated, in order, repeats included."""
        lines = self.answered()
        return [tuple(line["prompt"]) for line in lines if not line["stream"] and not line["sample_key"]]

    def extracted(self) -> list[str]:
        """Sample keys whose states were captured, in order, repeats included."""
        return [line["sample_key"] for line in self.answered() if line["sample_key"]]

    def measured(self) -> int:
        """Streamed requests, warm-up included."""
        return sum(line["stream"] for line in self.answered())


class RealCampaign(StubCampaign):
    """The same small campaign on a real engine; it keeps no journal, so only tables and files tell what was done."""

    def __init__(self, folder: Path, engine: str) -> None:
        super().__init__(folder)
        cache = {"vllm": {"kv_cache_gib": 1}, "sglang": {"kv_tokens": 16384, "chunked_prefill_size": 512}}[engine]
        data = yaml.safe_load(self.file.read_text())
        for arm in data["arms"]:
            arm |= {"engine": engine, "tuning": arm["tuning"] | {"extra_args": []} | cache}
            if arm["speculative"]:
                arm["speculative"] |= {"extracted_on": engine}
        data["machine"]["ready_timeout_s"] = 600
        self.file.write_text(yaml.safe_dump(data))
