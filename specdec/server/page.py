"""What stands at `/`: the place for a page that shows the server at work."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from specdec.server.service import Service


def add_page(router: APIRouter, service: Service) -> None:
    """Put the page on a router."""

    @router.get("/", include_in_schema=False)
    async def page() -> Response:
        """Where to go from here."""
        endpoints = ["/v1/completions", "/v1/chat/completions", "/v1/models", "/metrics", "/docs"]
        return JSONResponse({"models": list(service.config.model_names), "endpoints": endpoints})
