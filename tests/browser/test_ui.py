"""A person in front of the Prefect UI: fill the form, start, see progress and a failure, press Retry, see the end.

Screenshots are kept under test-output/.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from prefect.client.schemas.objects import StateType
from prefect_kit import ROOT, PrefectStack, until
from stub_campaign import StubCampaign

SCREENSHOTS = ROOT / "test-output"
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
         "--disable-sync", "--no-first-run"]


@pytest.fixture(scope="module")
def chromium() -> Iterator[object]:
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("no chromium: `apt-get install chromium`")
    playwright = pytest.importorskip("playwright.sync_api", reason="no playwright: `make environment`")
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=program, args=FLAGS)
        yield browser
        browser.close()


class Person:
    """Somebody with a browser, who keeps what is seen."""

    def __init__(self, browser: object, url: str, ui: str) -> None:
        self.page = browser.new_page(viewport={"width": 1300, "height": 1400})  # type: ignore[attr-defined]
        self.page.set_default_timeout(30_000)
        self._base, self._ui, self._count = f"{url}{'/v2' if ui == 'v2' else ''}", ui, 0

    def open(self, path: str) -> None:
        self.page.goto(f"{self._base}{path}", wait_until="networkidle")

    def keep(self, what: str) -> None:
        SCREENSHOTS.mkdir(exist_ok=True)
        self._count += 1
        self.page.screenshot(path=str(SCREENSHOTS / f"{self._ui}-{self._count}-{what}.png"))

    def press(self, name: str) -> None:
        self.page.get_by_role("button", name=name, exact=True).first.click()


def test_form_run_failure_retry_and_completion(prefect: PrefectStack, chromium: object, tmp_path: Path) -> None:
    small = StubCampaign(tmp_path, step_s=0.02)
    small.broken.touch()
    deployment = prefect.client.read_deployment_by_name("campaign/campaign")
    known = {run.id for run in prefect.runs_of(deployment.id)}
    person = Person(chromium, prefect.url, "v2")

    person.open(f"/deployments/deployment/{deployment.id}/run")
    page = person.page
    page.get_by_text("Campaign file", exact=True).wait_for()
    person.keep("form")
    page.get_by_role("tab", name="By path").click()
    page.get_by_role("tabpanel").locator("textarea, input").first.fill(str(small.file))
    page.locator(f"textarea:has-text('{prefect.store}')").fill(str(tmp_path / "store"))
    person.keep("form-filled")
    person.press("Submit")

    run = until(lambda: next((r.id for r in prefect.runs_of(deployment.id) if r.id not in known), None), 60, "a run")
    assert prefect.run(run).parameters["config"] == str(small.file)
    person.open(f"/runs/flow-run/{run}")
    until(lambda: any(k.startswith("progress-") for k in prefect.artifacts(run)), 90, "a progress artifact")
    person.open(f"/runs/flow-run/{run}?tab=Artifacts")
    page.get_by_text("progress", exact=False).first.wait_for()
    person.keep("progress")

    failed = prefect.finish(run)
    assert failed.state and failed.state.type is StateType.FAILED
    person.open(f"/runs/flow-run/{run}")
    page.get_by_text("Failed", exact=True).first.wait_for()
    person.keep("failed")
    before = small.measured(), small.generated(), small.extracted()
    small.broken.unlink()
    page.locator("button[aria-haspopup=menu]").first.click()
    page.get_by_role("menuitem", name="Retry").click()
    person.keep("retry")
    person.press("Retry")
    until(lambda: prefect.run(run).run_count > 1, 60, "the run starts again")
    done = prefect.finish(run)
    assert done.state and done.state.type is StateType.COMPLETED, prefect.logs(run)
    person.open(f"/runs/flow-run/{run}?tab=Artifacts")
    page.get_by_text("Completed", exact=True).first.wait_for()
    person.keep("completed")

    assert (small.generated(), small.extracted()) == before[1:], "finished samples are not made again"
    assert len(small.generated()) == 8 and small.measured() - before[0] == 2 * (4 + 1)


@pytest.mark.parametrize("ui", ["v1", "v2"])
def test_every_field_of_a_campaign_is_a_field_of_the_form(prefect: PrefectStack, chromium: object, ui: str) -> None:
    """Selects for choices, lists for arms and workloads, a description for all, and no JSON editor."""
    deployment = prefect.client.read_deployment_by_name("campaign/campaign-from-fields")
    person = Person(chromium, prefect.url, ui)
    person.open(f"/deployments/deployment/{deployment.id}/run")
    page = person.page
    page.get_by_text("Server configurations, started one after another in this order").wait_for()
    for field in ("Arms", "Workloads"):
        page.get_by_text(field, exact=True).first.wait_for()
    page.get_by_role("button", name="Add item").nth(2).click()
    page.get_by_text("Cap on requests that run at once").wait_for()
    page.set_viewport_size({"width": 1300, "height": 6000})
    person.keep("all-fields")
    text = page.inner_text("body")
    for shown in ("Ready timeout (s)", "in seconds. Default: 600.", "Kv cache (GiB)", "EAGLE-3 drafter"):
        assert shown in text
    assert page.locator(".cm-editor, .monaco-editor, [data-language=json]").count() == 0


def test_a_wrong_field_is_named_on_the_form(prefect: PrefectStack, chromium: object) -> None:
    deployment = prefect.client.read_deployment_by_name("campaign/campaign-from-fields")
    person = Person(chromium, prefect.url, "v2")
    person.open(f"/deployments/deployment/{deployment.id}/run")
    person.page.get_by_text("Server configurations, started one after another in this order").wait_for()
    person.press("Submit")
    person.page.get_by_text("is a required property").first.wait_for()
    person.page.set_viewport_size({"width": 1300, "height": 6000})
    person.keep("wrong-field")
