"""The page in a real headless Chromium: it works, says nothing on its console, and asks nobody else."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from specdec.config import SpecConfig
from specdec.engine import Engine

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed"),
]
WAIT_MS = 60_000
# folder for pictures of the page, for people; none are kept without it
PICTURES = os.environ.get("SPECDEC_PAGE_PICTURES")
NASTY = (
    '<img src=x onerror="document.title=\'taken\'"><script>document.title="taken"</script> & \u2028 the in an'
)


@pytest.fixture(scope="module")
def live(make_engine: Callable[..., Engine], solo: Engine, serving: Any) -> Iterator[Any]:
    with serving(
        make_engine(solo, spec=SpecConfig(max_depth=3, top_k=1, max_nodes=3, adaptive=False))
    ) as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        # a container's root may not use the sandbox; the page is our own
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


class Watched:
    """A page, and all that it said and asked for."""

    def __init__(self, browser: Any, url: str, **context: Any) -> None:
        self.context = browser.new_context(**context)
        self.page = self.context.new_page()
        self.page.set_default_timeout(WAIT_MS)
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.url = url
        self.page.goto(url)

    def check(self) -> None:
        assert self.said == []
        assert [url for url in self.asked if not url.startswith(self.url)] == []

    def until(self, expression: str) -> None:
        """Wait until it is true; the policy forbids the page itself to evaluate it."""
        deadline = time.monotonic() + WAIT_MS / 1000
        while not self.page.evaluate(expression):
            assert time.monotonic() < deadline, expression
            time.sleep(0.05)

    def ask(self, text: str, tokens: int = 40, temperature: float = 0.0) -> Any:
        """Ask and wait for the whole answer; returns the last turn."""
        self.page.fill("#max-tokens", str(tokens))
        self.page.fill("#temperature", str(temperature))
        self.page.fill("#prompt", text)
        self.page.press("#prompt", "Enter")
        self.until("document.querySelector('#said').textContent && !document.querySelector('#send').disabled")
        return self.page.locator(".turn").last

    def picture(self, name: str) -> None:
        if PICTURES:
            self.page.screenshot(path=str(Path(PICTURES) / f"{name}.png"), full_page=True)


@pytest.fixture
def opened(browser: Any, live: Any) -> Iterator[Callable[..., Watched]]:
    """Call with settings of a browser's context: the page, opened."""
    pages: list[Watched] = []

    def make(**context: Any) -> Watched:
        pages.append(Watched(browser, live.url, **context))
        return pages[-1]

    yield make
    for watched in pages:
        watched.context.close()


def test_an_answer_is_marked_token_by_token(opened: Callable[..., Watched], live: Any) -> None:
    watched = opened()
    turn = watched.ask("say the in an the in an")
    kinds = turn.locator(".token").evaluate_all("spans => spans.map(span => span.className)")
    assert "token plain" in kinds
    assert {"token accepted", "token recovered"} & set(kinds)
    body = {
        "messages": [{"role": "user", "content": "say the in an the in an"}],
        "max_tokens": 40,
        "temperature": 0,
    }
    expected = live.post("/v1/chat/completions", body)[1]
    assert (
        turn.locator(".text").evaluate("text => text.textContent")
        == expected["choices"][0]["message"]["content"]
    )
    counts = turn.locator(".counts").text_content()
    told = expected["metrics"]["speculative_decoding"]
    assert f"{told['mean_acceptance_length']:.2f} tokens per target pass" in counts
    # shapes tell the kinds apart without colour
    styles = {
        kind: watched.page.locator(f"#legend .token.{kind}").evaluate(
            "span => getComputedStyle(span).textDecorationLine + getComputedStyle(span).textDecorationStyle"
        )
        for kind in ("accepted", "recovered", "bonus", "plain")
    }
    assert len(set(styles.values())) == 4
    watched.check()


def test_markup_in_texts_stays_text_and_turns_go_on(opened: Callable[..., Watched]) -> None:
    watched = opened()
    watched.ask(NASTY, tokens=8)
    watched.ask("and the in an", tokens=8, temperature=1)
    assert watched.page.locator(".turn").count() == 4
    assert watched.page.locator(".turn").first.locator(".text").text_content() == NASTY
    assert watched.page.locator("#log img, #log script").count() == 0
    assert watched.page.title() == "specdec"
    watched.page.click("#clear")
    assert watched.page.locator(".turn").count() == 0
    watched.check()


def test_numbers_live_and_a_hidden_depth_list_appears(opened: Callable[..., Watched]) -> None:
    watched = opened()
    watched.ask("the in an")
    page = watched.page
    watched.until("/^[0-9.]+$/.test(document.querySelector('#acceptance-value').textContent)")
    assert float(page.text_content("#acceptance-value")) >= 1
    watched.until("Number(document.querySelector('#throughput-value').textContent) > 0")
    page.wait_for_selector("#depth-list li")
    assert page.locator("#depth-list li").count() == 3
    assert "tiny" in page.text_content("#served")
    assert page.text_content("#health") == ""
    watched.check()


def test_an_answer_can_be_stopped_and_the_server_forgets_it(
    opened: Callable[..., Watched], live: Any
) -> None:
    watched = opened()
    page = watched.page
    page.fill("#max-tokens", "1900")
    page.fill("#prompt", "the in an the in an")
    page.click("#send")
    page.wait_for_selector(".turn.assistant .token")
    page.keyboard.press("Escape")
    watched.until("!document.querySelector('#send').disabled")
    assert page.text_content("#said") in ("Stopped.", "The answer is complete.")
    live.wait_until_idle()
    watched.check()


def test_a_refusal_is_shown_and_the_question_kept(opened: Callable[..., Watched]) -> None:
    watched = opened()
    # or the browser refuses it first
    watched.page.evaluate("document.querySelector('#temperature').removeAttribute('min')")
    turn = watched.ask("the in an", temperature=-1)
    assert "temperature (-1" in turn.locator(".error").text_content(timeout=1000)
    assert watched.page.input_value("#prompt") == "the in an"
    # the browser itself notes a response of 400
    assert all("400" in said for said in watched.said)


def test_a_key_is_asked_for_where_one_is_needed(
    browser: Any, make_engine: Callable[..., Engine], solo: Engine, serving: Any
) -> None:
    with serving(make_engine(solo), api_keys=("secret",)) as live:
        watched = Watched(browser, live.url)
        watched.page.wait_for_selector("#key", state="visible")
        turn = watched.ask("the in an", tokens=4)
        assert "API key is missing" in turn.locator(".error").text_content()
        watched.page.fill("#key", "secret")
        assert watched.ask("the in an", tokens=4).locator(".token").count() > 0
        watched.context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("name", "width", "height"), [("desk", 1280, 800), ("phone", 360, 740)])
def test_it_fits_and_reads_well(
    opened: Callable[..., Watched], scheme: str, name: str, width: int, height: int
) -> None:
    """No sideways scrolling, and text that stands out from its ground by 4.5 to 1 (WCAG AA)."""
    watched = opened(color_scheme=scheme, viewport={"width": width, "height": height})
    watched.ask("say the in an the in an", tokens=120, temperature=1)
    page = watched.page
    page.wait_for_selector("#depth-list li")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert min(page.evaluate(CONTRASTS)) >= 4.5
    watched.picture(f"{name}-{scheme}")
    watched.check()


def test_the_keyboard_reaches_everything_in_order(opened: Callable[..., Watched]) -> None:
    watched = opened()
    page = watched.page
    reached = []
    for _ in range(9):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id || document.activeElement.className"))
    order = ["skip", "log", "prompt", "temperature", "max-tokens", "speculate", "send", "clear"]
    assert [name for name in reached if name in order][:8] == order
    for control in page.locator("input:visible, textarea, button").all():
        assert control.evaluate("item => item.labels?.length || item.textContent.trim()")
    watched.check()


# of every element with text of its own: contrast of its colour with the ground it stands on
CONTRASTS = """
() => {
  const numbers = (color) => color.match(/[0-9.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b]
    .map((v) => v / 255)
    .map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (node) => {
    for (; node; node = node.parentElement) {
      const color = numbers(getComputedStyle(node).backgroundColor);
      if (color.length < 4 || color[3] > 0) return color;
    }
    return [255, 255, 255];
  };
  const own = (node) => [...node.childNodes].some((c) => c.nodeType === 3 && c.textContent.trim());
  return [...document.body.querySelectorAll("*")]
    .filter((node) => own(node) && node.checkVisibility() && !node.disabled)
    .map((node) => {
      const [a, b] = [light(numbers(getComputedStyle(node).color)), light(ground(node))];
      return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    });
}
"""
