"""Responses in a store, and servers given as the flow gives them."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

from fake_engine import FakeServer, serving

from tasks.config import Campaign
from tasks.store.refs import ResponsesRef
from tasks.store.tables import Store, rows_to_table, write_parquet

LENGTHS = (3, 17, 64, 65, 200)


def responses_of(store: Store, lengths: tuple[int, ...] = LENGTHS) -> ResponsesRef:
    rows = [
        {
            "sample_key": f"{n:032x}", "draw": 0, "prompt_key": f"p{n}", "prompt_tokens": n // 2 + 1,
            "token_ids": [(7 * i + n) % 2000 for i in range(n)], "finish_reason": "stop", "messages_json": "[]",
            "reused_from": store.run_id,
        }
        for n in lengths
    ]
    key = f"responses-{'-'.join(map(str, lengths))}"
    with store.new_artifact("responses", key, {}) as folder:
        write_parquet(rows_to_table("responses", rows), folder / "responses.parquet")
    return ResponsesRef(key=key, samples=len(rows), tokens=sum(lengths))


class Servers:
    """Gives servers as the flow does, and keeps them for counting."""

    def __init__(self, campaign: Campaign, model: Path, fault: str = "") -> None:
        self.campaign, self.model, self.fault, self.made = campaign, model, fault, list[FakeServer]()

    def __call__(self, folder: Path) -> AbstractContextManager[FakeServer]:
        self.made.append(FakeServer(self.model, self.campaign.arms[1], folder, (1, 2, 3, 4), self.fault))
        return serving(self.made[-1])

    @property
    def starts(self) -> int:
        return sum(server.starts for server in self.made)

    @property
    def samples_asked(self) -> int:
        """Requests but for the probe of each start."""
        return sum(server.requests for server in self.made) - self.starts
