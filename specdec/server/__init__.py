"""The HTTP server: OpenAI-compatible endpoints in front of one engine.

Owns the way from a request's bytes to the engine and back. What is where:

- `config`: every setting; `problems`: what goes wrong, in OpenAI's error shape; `bodies`: bytes to checked
  fields; `fields`: which fields there are; `requests_made`: fields to prompts and sampling parameters.
- `engine_loop`: the engine in a thread of its own; `tickets`: one request's way there and back.
- `completions`, `chat`: the two generating endpoints; `answers`, `token_text`, `tool_calls`: their parts.
- `metrics`, `gauges`: what Prometheus reads; `access`: keys, request ids, log lines; `app`: all of it
  together; `run`: sockets, signals and exit codes; `page`: what stands at `/`.

Imports the runtime only, and needs the extra `serve` (fastapi, uvicorn, prometheus-client).
"""
