"""Metrics over steps, the lines of history, and addresses of what is shown."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect
from test_page import open_tab

GOES_BACK = """
    nm.init(sys.argv[1], 0, 2, on_error="raise")
    def save(step, loss):
        checkpoint = nm.Checkpoint(f"global_step{step}", metrics={"val_loss": loss, "accuracy": 1 - loss})
        checkpoint.save("model.pt", {"weight": torch.ones(10)})
        assert checkpoint.commit()
        checkpoint.wait("durable")
    if sys.argv[2] == "first":
        for step, loss in ((10, 0.9), (20, 0.1), (30, 0.7)):
            save(step, loss)
    else:
        nm.get_checkpoint("global_step10").load("model.pt")
        for step, loss in ((15, 0.5), (25, 0.3), (35, 0.4)):
            save(step, loss)
"""


@pytest.mark.nightly("studio/test_page.py::test_filter_sort_and_compare")
def test_metrics_over_steps_show_the_best_that_can_be_loaded_and_the_lines_of_history(place, start, page):
    place.run(GOES_BACK, place.storage, "first")
    place.run(GOES_BACK, place.storage, "back")
    page.goto(start(place.storage).address)
    open_tab(page, "metrics")
    page.get_by_label("Metric", exact=True).select_option("val_loss")
    chart, lineage = (page.get_by_role("group", name="val_loss over steps"), page.get_by_role("group", name="lines of history"))
    expect(chart.get_by_role("link")).to_have_count(6)
    expect(chart.locator("polyline")).to_have_count(2)
    # The smallest of all is abandoned: nobody would resume from it.
    expect(page.get_by_text("The smallest val_loss that can be loaded: 0.3 in global_step25")).to_be_visible()
    expect(chart.locator("text.strong")).to_have_text("best: 0.3")
    expect(lineage).to_have_attribute("aria-label", "2 lines of history")
    assert lineage.locator(".dot.left").count() == 2, "20 and 30 were left behind"
    expect(page.locator("ul.events")).to_contain_text("the job went back to step 10: 3 versions since, from step 15 to 35")
    page.get_by_label("Metric", exact=True).select_option("accuracy")
    expect(page.get_by_text("The largest accuracy that can be loaded: 0.7 in global_step25")).to_be_visible()
    page.get_by_label("Best is").select_option("min")
    expect(page).to_have_url(re.compile(r"#metrics\?metric=accuracy&best=min$"))
    page.reload()
    expect(page.get_by_text("The smallest accuracy that can be loaded: 0.1 in global_step10")).to_be_visible()
    page.get_by_role("group", name="accuracy over steps").get_by_role("link", name="global_step15").press("Enter")
    expect(page).to_have_url(re.compile("#version/global_step15$"))


@pytest.mark.nightly
def test_filter_order_and_a_second_tab_have_addresses_that_work_without_the_token(place, start, save, page):
    save(1, 2, 10)
    page.goto(start(place.storage).address)
    open_tab(page, "checkpoints")
    page.get_by_label("Filter").fill("step1")
    page.get_by_role("button", name="val_loss").click()
    page.get_by_role("button", name="val_loss").click()
    expect(page).to_have_url(re.compile(r"#checkpoints\?filter=step1&sort=metric\+val_loss&order=up$"))
    other = page.context.new_page()
    other.goto(page.url)
    expect(other.locator("tbody tr[data-key]")).to_have_count(2)
    expect(other.locator("th[aria-sort=ascending]")).to_contain_text("val_loss")
    assert other.locator("td.metric").all_inner_texts() == ["0.3", "3"]
    page.go_back()
    expect(page.locator("th[aria-sort=descending]")).to_contain_text("val_loss")


@pytest.mark.nightly
def test_a_row_that_was_selected_stays_selected_while_others_come(place, start, save, page):
    save(1)
    page.goto(start(place.storage).address)
    open_tab(page, "checkpoints")
    page.locator("tr[data-key] td").nth(7).select_text()  # the size
    selected = page.evaluate("String(getSelection())").strip()
    assert selected
    save(2)
    expect(page.locator("tbody tr[data-key]")).to_have_count(2)
    assert page.evaluate("String(getSelection())").strip() == selected
