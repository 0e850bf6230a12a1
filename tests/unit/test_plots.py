"""Plots of the report: medians of repeats with their spread."""

from __future__ import annotations

import pandas as pd
import pytest

from tasks.plots import lines


def measured(repeats: int) -> pd.DataFrame:
    rows = [
        {"arm": "base", "concurrency": c, "output_tok_s": c * 100.0 + 10 * repeat**2}
        for c in (1, 8) for repeat in range(repeats)
    ]
    return pd.DataFrame(rows)


def test_repeats_are_one_point_at_their_median_with_bars_to_the_least_and_the_largest() -> None:
    (line,) = lines(measured(3), "concurrency", "output_tok_s", ["arm"]).data
    assert (list(line.x), list(line.y)) == ([1, 8], [110.0, 810.0])
    assert (list(line.error_y.array), list(line.error_y.arrayminus)) == ([30.0, 30.0], [10.0, 10.0])


@pytest.mark.parametrize("frame", [measured(1), measured(0).reindex(columns=["arm", "concurrency", "output_tok_s"])])
def test_single_measurements_and_none_have_no_bars(frame: pd.DataFrame) -> None:
    assert all(line.error_y.array is None for line in lines(frame, "concurrency", "output_tok_s", ["arm"]).data)
