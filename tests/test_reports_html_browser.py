"""The page in a real browser: no errors, no loads, no sideways scroll, usable by keyboard."""

import shutil

import pytest

from rnnaudit.reports import html
from tests.test_reports_html import PICTURED, REFUSAL, REPORTS

pytestmark = pytest.mark.slow

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next((path for name in NAMES if (path := shutil.which(name))), None)


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("no Chromium was found")
    with playwright.sync_playwright() as running:
        chromium = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(html.page([PICTURED, REPORTS["truncate_fail"], REFUSAL]), "utf-8")
    return path.as_uri()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1100])
def test_it_opens_silently_alone_and_never_scrolls_sideways(browser, address, scheme, width):
    view = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 800})
    page = view.new_page()
    said, asked = [], []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(address)
    page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true })")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    ink, paper = (
        page.evaluate(f"getComputedStyle(document.body).{name}")
        for name in ("color", "backgroundColor")
    )
    light = [sum(map(int, colour[4:-1].split(", "))) for colour in (ink, paper)]
    assert (light[0] < light[1]) == (scheme == "light")
    assert said == []
    assert asked == [address]
    view.close()


def test_the_numbers_open_by_keyboard(browser, address):
    page = browser.new_page()
    page.goto(address)
    for _ in range(60):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.parentElement.className") == "data":
            break
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.parentElement.open")
    page.close()


def test_it_prints(browser, address):
    page = browser.new_page()
    page.goto(address)
    assert page.pdf(format="A4").startswith(b"%PDF")
    page.close()
