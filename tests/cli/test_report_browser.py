"""A report in a real headless Chromium: no request, nothing on its console, readable on screen and paper."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specdec.cli.main import main
from specdec.cli.palette import DARK, LIGHT

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed"),
]
ROOT = Path(__file__).resolve().parents[2]
MEASURED = ROOT / "results" / "2026-11-30-cpu2-smollm2-135m"
NAMES = ("bench_served_batch1.json", "sweep/sweep.json", "layers/selection.json", "audit/float32/audit.json")
# folder for pictures of the page, for people; none are kept without it
PICTURES = os.environ.get("SPECDEC_PAGE_PICTURES")
# what WCAG asks of text, and of what a chart is drawn with
TEXT_CONTRAST, DRAWN_CONTRAST = 4.5, 3.0
# an element's box reaches out of the page, unless something around it scrolls
OUTSIDE = """() => [...document.querySelectorAll('body *')].filter(element =>
    element.getBoundingClientRect().right > document.documentElement.clientWidth + 1
    && !element.closest('.wide')).map(element => element.outerHTML.slice(0, 80))"""
SMALLEST_TEXT = """() => Math.min(...[...document.querySelectorAll('svg text')].map(
    text => text.getBoundingClientRect().height))"""


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("report") / "report.html"
    assert main(["report", *(str(MEASURED / name) for name in NAMES), "--out", str(out)]) == 0
    return out


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        # a container's root may not use the sandbox; the page is our own
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 768, 1280])
def test_the_page_is_whole_in_itself_and_fits(page_file: Path, browser: Any, width: int, scheme: str) -> None:
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page = context.new_page()
    said: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(page_file.as_uri())
    assert said == []
    assert [url for url in asked if not url.startswith(("data:", page_file.as_uri()))] == []
    assert page.evaluate(OUTSIDE) == []
    assert page.evaluate(SMALLEST_TEXT) > 7, "text in charts is too small to be read"
    colors = DARK if scheme == "dark" else LIGHT
    seen = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert seen == f"rgb{_channels(colors['paper'])}"
    if PICTURES:
        page.screenshot(path=f"{PICTURES}/report-{width}-{scheme}.png", full_page=True)
    context.close()


def test_a_printed_page_is_light_and_cuts_no_chart(page_file: Path, browser: Any) -> None:
    context = browser.new_context(color_scheme="dark")
    page = context.new_page()
    page.goto(page_file.as_uri())
    page.emulate_media(media="print", color_scheme="dark")
    seen = page.evaluate("getComputedStyle(document.documentElement).getPropertyValue('--ink')")
    assert seen.strip() == LIGHT["ink"]
    assert page.evaluate("getComputedStyle(document.querySelector('figure')).breakInside") == "avoid"
    pdf = page.pdf()
    assert pdf.startswith(b"%PDF")
    if PICTURES:
        Path(PICTURES, "report.pdf").write_bytes(pdf)
    context.close()


def test_all_is_there_for_the_keyboard_and_the_screen_reader(page_file: Path, browser: Any) -> None:
    page = browser.new_page()
    page.goto(page_file.as_uri())
    assert page.get_by_role("img").count() == page.locator("figure").count() > 8
    assert page.get_by_role("img", name="Speed-up over no speculation").count() == 1
    summary = page.locator("summary").first
    summary.focus()
    page.keyboard.press("Enter")
    assert page.locator("details[open] table").count() == 1
    assert page.locator(".wide:not([tabindex])").count() == 0
    page.close()


@pytest.mark.parametrize("colors", [LIGHT, DARK], ids=["light", "dark"])
def test_colours_stand_out_from_the_page(colors: dict[str, str]) -> None:
    for name, color in colors.items():
        if name in ("ink", "soft", "mark"):
            assert _contrast(color, colors["paper"]) >= TEXT_CONTRAST, name
        elif name.startswith("series"):
            assert _contrast(color, colors["paper"]) >= DRAWN_CONTRAST, name


def _channels(color: str) -> tuple[int, int, int]:
    red, green, blue = (int(color[start : start + 2], 16) for start in (1, 3, 5))
    return red, green, blue


def _contrast(one: str, other: str) -> float:
    lights = sorted(_luminance(color) for color in (one, other))
    return (lights[1] + 0.05) / (lights[0] + 0.05)


def _luminance(color: str) -> float:
    parts = [value / 255 for value in _channels(color)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
