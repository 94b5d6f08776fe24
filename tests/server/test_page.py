"""The page at `/` without a browser: what is sent, under which policy, and to whom."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from importlib.resources import files
from typing import Any

import pytest

from specdec.engine import Engine

NAMES = ("page.html", "page.css", "page_chat.js", "page_status.js", "page_icon.svg")
PATHS = ("/", *(f"/page/{name}" for name in NAMES[1:]), "/page/state")


def source(name: str) -> str:
    return (files("specdec.server") / "data" / name).read_text("utf-8")


def state(live: Any) -> dict[str, Any]:
    status, _, data = live.request("GET", "/page/state")
    assert status == 200
    found: dict[str, Any] = json.loads(data)
    return found


@pytest.mark.parametrize("path", PATHS)
def test_every_part_comes_with_a_policy_that_lets_nothing_else_in(live: Any, path: str) -> None:
    status, headers, data = live.request("GET", path)
    assert status == 200
    assert data
    policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert {policy[name] for name in ("script-src", "style-src", "connect-src", "img-src")} == {"'self'"}
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("name", NAMES)
def test_no_file_names_another_place_or_makes_markup_of_text(name: str) -> None:
    """Catches a font or script from elsewhere, and a way for a model's text to become markup."""
    text = source(name).replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?:|//[a-z]|@import|url\(", text)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", text)
    assert not re.search(r"\son[a-z]+=|style=|localStorage|sessionStorage|cookie", text)
    assert text.isascii()


def test_the_page_refers_to_its_own_parts_and_to_elements_it_has() -> None:
    html = source("page.html")
    assert {*re.findall(r'(?:src|href)="(?!#)([^"]+)"', html)} == {f"page/{name}" for name in NAMES[1:]}
    ids = re.findall(r'\bid="([^"]+)"', html)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'\b(?:for|aria-describedby)="([^"]+)"', html)) <= set(ids)
    for script in ("page_chat.js", "page_status.js"):
        asked = re.findall(r'\b(?:byId|element|show|draw)\("([a-z-]+)"', source(script))
        assert asked
        assert set(asked) <= set(ids)


def test_its_numbers_are_the_counters(live: Any) -> None:
    before = state(live)
    body = {"prompt": "the in an", "max_tokens": 12, "ignore_eos": True}
    answer = live.post("/v1/completions", body)[1]
    live.wait_until_idle()
    after = state(live)
    told = answer["metrics"]["speculative_decoding"]
    grown = {name: after[name] - before[name] for name in ("completion_tokens", "verify_steps", "committed")}
    assert grown == {
        "completion_tokens": 12,
        "verify_steps": told["verify_steps"],
        "committed": told["committed"],
    }
    assert sum(after["accepted_per_depth"]) == after["accepted"]
    assert (after["model"], after["draft"] is not None, after["needs_key"]) == ("tiny", True, False)
    assert (after["running"], after["waiting"]) == (0, 0)
    assert after["seconds"] > before["seconds"]


def test_a_key_guards_the_chat_and_not_the_numbers(
    make_engine: Callable[..., Engine], solo: Engine, serving: Any
) -> None:
    with serving(make_engine(solo), api_keys=("secret",)) as live:
        for path in PATHS:
            assert live.request("GET", path)[0] == 200, path
        assert state(live)["needs_key"] is True
        assert b"secret" not in live.request("GET", "/page/state")[2]
        assert live.post("/v1/chat/completions", {"messages": []})[0] == 401


def test_without_the_page_there_is_none(
    make_engine: Callable[..., Engine], solo: Engine, serving: Any
) -> None:
    with serving(make_engine(solo), page=False) as live:
        for path in PATHS:
            assert live.request("GET", path)[0] == 404, path
        assert live.request("GET", "/health")[0] == 200


def test_no_other_file_can_be_had(live: Any) -> None:
    for path in ("/page/grafana.json", "/page/../grafana.json", "/page/%2e%2e/page.py", "/page/", "/page"):
        assert live.request("GET", path)[0] == 404, path
