"""Plots of the report, from the tables' own columns."""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go


def lines(frame: pd.DataFrame, x: str, y: str, by: list[str]) -> go.Figure:
    """A line of medians of column `y` over `x` for each group of `by`; bars reach to the least and largest repeat."""
    figure = go.Figure(layout={"xaxis_title": x, "yaxis_title": y, "template": "plotly_white"})
    for key, rows in frame.dropna(subset=[y]).groupby(by):
        repeats = rows.groupby(x)[y]
        _add_line(figure, repeats.median(), " ".join(map(str, key)))
        if (repeats.size() > 1).any():
            up, down = (repeats.max() - repeats.median()).tolist(), (repeats.median() - repeats.min()).tolist()
            figure.data[-1].error_y = {"type": "data", "array": up, "arrayminus": down}
    return figure


def acceptance_by_position(acceptance: pd.DataFrame, replay: pd.DataFrame) -> go.Figure:
    """Accept rate by draft position: served solid, replayed dotted."""
    figure = go.Figure(layout={"xaxis_title": "position", "yaxis_title": "accept_rate", "template": "plotly_white"})
    served = acceptance[acceptance["category"].isna() & acceptance["position"].notna()]
    for (arm, workload), rows in served.groupby(["arm", "workload"]):
        _add_line(figure, rows.groupby("position")["accept_rate"].median(), f"served: {arm} {workload}")
    predicted = replay[replay["category"].isna() & replay["position"].notna()]
    for (drafter, auxiliary), rows in predicted.groupby(["drafter", "auxiliary"]):
        name = f"replayed: {drafter} ({auxiliary} auxiliary states)"
        _add_line(figure, rows.groupby("position")["accept_rate"].median(), name, dash="dot")
    return figure


def _add_line(figure: go.Figure, points: pd.Series, name: str, dash: str = "solid") -> None:
    figure.add_scatter(
        x=points.index.tolist(), y=points.tolist(), mode="lines+markers", name=name, line={"dash": dash}
    )


def stage_bars(stages: pd.DataFrame) -> go.Figure:
    """Wall seconds of each stage, in order."""
    ordered = stages.sort_values("started_at")
    names = (ordered["stage"] + " " + ordered["arm"].fillna("")).tolist()
    figure = go.Figure(layout={"xaxis_title": "wall_s", "template": "plotly_white", "yaxis": {"autorange": "reversed"}})
    return figure.add_bar(x=ordered["wall_s"].tolist(), y=names, orientation="h", name="wall_s") if names else figure
