"""Debian's chromium on a real Prefect server, and a folder for what it showed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

TIMEOUT_MS = 60_000  # the machine may be busy
SETTLE_MS = 2_500  # charts move into their place
SCREENSHOTS = os.environ.get("PERDURE_SCREENSHOTS")  # a folder; without one, none are taken


@pytest.fixture(scope="module")  # its event loop must not run under the tests of other files
def browser() -> Iterator[Browser]:
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("no chromium: apt-get install --no-install-recommends chromium")
    expect.set_options(timeout=TIMEOUT_MS)
    with sync_playwright() as playwright:
        # As root, as in a container, chromium has no sandbox.
        arguments = ["--no-sandbox"] if os.getuid() == 0 else []
        yield playwright.chromium.launch(executable_path=path, args=arguments)


@dataclass
class Visitor:
    """A browser on the UI, which takes pictures of it where they are wanted."""

    page: Page
    ui_url: str

    def goto(self, path: str) -> Page:
        """Open a page of the UI."""
        self.page.goto(self.ui_url + path, timeout=TIMEOUT_MS)
        return self.page

    def keep(self, name: str) -> None:
        """Keep a picture of the page as it is."""
        if SCREENSHOTS:
            self.page.wait_for_timeout(SETTLE_MS)
            self.page.screenshot(path=Path(SCREENSHOTS) / f"{name}.png", full_page=True)


@pytest.fixture
def visitor(browser, prefect_server) -> Iterator[Visitor]:
    context = browser.new_context(viewport={"width": 1500, "height": 1100})
    context.set_default_timeout(TIMEOUT_MS)
    yield Visitor(context.new_page(), prefect_server.ui_url)
    context.close()
