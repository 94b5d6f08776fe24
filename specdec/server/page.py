"""The page at `/`: the server at work, and a chat that shows which tokens were drafted.

Owns the files of the page (hand-written, in `data/`), the numbers it reads, and its headers. Nothing on it
comes from elsewhere, and the policy sent with it has the browser see to that. It shows no text of anybody's
requests; its chat goes through the API as every other client does, with a key where one is needed.
"""

from __future__ import annotations

import time
from importlib.resources import files
from typing import Any

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

import specdec
from specdec.server.metrics import PREFIX
from specdec.server.service import Service

_FILES = {
    "page.css": "text/css; charset=utf-8",
    "page_chat.js": "text/javascript; charset=utf-8",
    "page_status.js": "text/javascript; charset=utf-8",
    "page_icon.svg": "image/svg+xml",
}
PAGE_STATE = "/page/state"
# open without a key, as `/` is: what they hold is in /metrics too
PAGE_PATHS = frozenset({PAGE_STATE, *(f"/page/{name}" for name in _FILES)})
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    # a new version of the server must not meet an old script
    "cache-control": "no-cache",
}
_PER_DEPTH = "spec_decode_num_accepted_tokens_per_pos_total"
# names of the page's numbers, and of the metrics they are sums of
_NUMBERS = {
    "running": "num_requests_running",
    "waiting": "num_requests_waiting",
    "capacity": "max_requests",
    "preemptions": "num_preemptions_total",
    "prompt_tokens": "prompt_tokens_total",
    "completion_tokens": "generation_tokens_total",
    "verify_steps": "spec_decode_num_verify_steps_total",
    "drafts": "spec_decode_num_drafts_total",
    "drafted": "spec_decode_num_draft_tokens_total",
    "accepted": "spec_decode_num_accepted_tokens_total",
    "committed": "spec_decode_num_committed_tokens_total",
    "prefix_queries": "prefix_cache_queries_total",
    "prefix_hits": "prefix_cache_hits_total",
}


def add_page(router: APIRouter, service: Service) -> None:
    """Put the page on a router."""
    folder = files("specdec.server") / "data"
    _add_file(router, "/", (folder / "page.html").read_bytes(), "text/html; charset=utf-8")
    for name, media_type in _FILES.items():
        _add_file(router, f"/page/{name}", (folder / name).read_bytes(), media_type)

    @router.get(PAGE_STATE, include_in_schema=False)
    async def state() -> Response:
        """The numbers that the page shows."""
        return JSONResponse(page_state(service), headers=_HEADERS)


def _add_file(router: APIRouter, path: str, content: bytes, media_type: str) -> None:
    @router.get(path, include_in_schema=False)
    async def send() -> Response:
        return Response(content, media_type=media_type, headers=_HEADERS)


def page_state(service: Service) -> dict[str, Any]:
    """Counters and gauges as they are now; rates are the page's division, as with Prometheus."""
    sums: dict[str, float] = {}
    per_depth: dict[int, int] = {}
    for family in service.metrics.registry.collect():
        for sample in family.samples:
            name = sample.name.removeprefix(PREFIX)
            sums[name] = sums.get(name, 0) + sample.value
            if name == _PER_DEPTH:
                depth = int(sample.labels["position"])
                per_depth[depth] = per_depth.get(depth, 0) + int(sample.value)
    engine = service.engine
    # those of the server's own shape from the start, deeper ones once a request has asked for them
    depths = max(engine.config.spec.max_depth if engine.drafter else 0, max(per_depth, default=-1) + 1)
    return {
        "version": specdec.__version__,
        "model": service.config.model_names[0],
        "draft": engine.drafter.name if engine.drafter else None,
        "rule": service.config.default_rule or "exact",
        "device": f"{engine.config.device}, {engine.config.dtype}",
        "max_depth": engine.config.spec.max_depth,
        "needs_key": bool(service.config.api_keys),
        "not_ready": service.not_ready,
        "seconds": time.monotonic(),
        "kv_usage": sums.get("kv_cache_usage_perc", 0.0),
        "accepted_per_depth": [per_depth.get(depth, 0) for depth in range(depths)],
        **{shown: int(sums.get(name, 0)) for shown, name in _NUMBERS.items()},
    }
