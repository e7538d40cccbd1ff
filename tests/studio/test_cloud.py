"""The page for a path in a container of Azure Blob Storage, in an emulator."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from azure_requests import make_container
from playwright.sync_api import expect

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "azurite.sh"
PATH = "az://devstoreaccount1/training/run7"


@pytest.fixture
def container(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An emulator with an empty container, whose address is in the environment."""
    line = ["bash", str(SCRIPT), "run", "bash", "-c", 'echo "$AZURE_STORAGE_CONNECTION_STRING"; read -r']
    emulator = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)
    told = emulator.stdout.readline().strip()
    if not told and emulator.wait(60) == 77:
        pytest.skip("npm is not here, which installs Azurite")
    assert told.startswith("DefaultEndpointsProtocol") or "AccountName" in told, told
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", told)
    make_container("training")
    yield
    emulator.stdin.close()
    try:
        emulator.wait(60)
    except subprocess.TimeoutExpired:
        os.killpg(emulator.pid, signal.SIGKILL)


@pytest.mark.nightly("studio/test_page.py::test_one_checkpoint_is_verified_looked_into_and_pinned", "integration/test_cli.py::test_inspect_reads_the_directory_of_a_stored_file_and_verify_reads_its_bytes_once")
def test_versions_in_a_container_are_shown_verified_and_pinned_without_an_agent(container, place, start, page):
    place.run(
        """
        nm.init(sys.argv[1], 0, 2, on_error="raise")
        for step in (1, 2):
            checkpoint = nm.Checkpoint(f"global_step{step}", metrics={"val_loss": 1 / step})
            checkpoint.save("model.pt", {"weight": torch.ones(3, 4)})
            assert checkpoint.commit()
            checkpoint.wait("durable")
        """,
        PATH,
    )
    place.kill_agent()
    studio = start(PATH)
    assert "AccountKey" not in studio.said
    page.goto(studio.address)
    expect(page.locator(".path")).to_have_text(PATH)
    page.locator("#tab-checkpoints").click()
    rows = page.locator("tbody tr[data-key]")
    expect(rows).to_have_count(2)
    expect(rows.first.get_by_role("cell", name="0.5", exact=True)).to_be_visible()
    page.get_by_role("button", name="global_step1").click()
    page.get_by_role("button", name="Verify").click()
    expect(page.locator("#check")).to_contain_text("every byte is as it was written")
    page.get_by_role("button", name="tensors of model.pt").click()
    expect(page.get_by_role("region", name="Tensors of model.pt")).to_contain_text("3 \u00d7 4")
    page.get_by_role("button", name="Pin…").click()
    page.get_by_label("Reason").fill("kept")
    page.get_by_role("button", name="Pin", exact=True).click()
    expect(page.get_by_role("button", name="Unpin")).to_be_visible()
    told = studio.ask("POST", "/api/save-now", {})
    assert told[0] == 409 and "storage directory" in told[2]["error"]
