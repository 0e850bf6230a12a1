"""Reading of the Prometheus text format that both engines answer on /metrics.

Format: https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import requests

_SAMPLE = re.compile(r"(?P<name>[A-Za-z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)(?:\s+-?\d+)?\s*\Z")
_LABEL = re.compile(r'([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"')
_ESCAPES = {"\\n": "\n", '\\"': '"', "\\\\": "\\"}


@dataclass(frozen=True)
class Sample:
    """One series of one scrape."""

    name: str
    labels: dict[str, str]
    value: float


def parse(text: str) -> list[Sample]:
    """All finite samples of a scrape; comments, NaN and lines of other kinds are skipped."""
    found = []
    for line in text.splitlines():
        match = None if line.startswith("#") else _SAMPLE.match(line)
        if match is None:
            continue
        try:
            value = float(match["value"])
        except ValueError:
            continue
        if math.isfinite(value):
            labels = {k: re.sub(r"\\.", _unescape, v) for k, v in _LABEL.findall(match["labels"] or "")}
            found.append(Sample(match["name"], labels, value))
    return found


def _unescape(match: re.Match[str]) -> str:
    return _ESCAPES.get(match[0], match[0])


def scrape(url: str, timeout_s: float = 10.0) -> list[Sample]:
    """Samples of `<url>/metrics`; raises requests.RequestException if it does not answer."""
    with requests.Session() as session:
        session.trust_env = False  # a proxy of the user's shell must never come between us and the loopback
        response = session.get(f"{url}/metrics", timeout=timeout_s)
    response.raise_for_status()
    return parse(response.text)


def by_label(samples: list[Sample], name: str, label: str) -> dict[str, float]:
    """Values of `name` summed per value of `label`; empty = not reported. Absent labels read as ""."""
    found: dict[str, float] = {}
    for sample in samples:
        if sample.name == name:
            key = sample.labels.get(label, "")
            found[key] = found.get(key, 0.0) + sample.value
    return found


def total(samples: list[Sample], name: str) -> float | None:
    """Sum of `name` over all its series; None = not reported, which is not 0."""
    values = [s.value for s in samples if s.name == name]
    return sum(values) if values else None
