"""The listening socket, taken before anything slow: a port in use is known at once.

Imports nothing heavy.
"""

from __future__ import annotations

import socket

from specdec.errors import SpecdecError


def bind(host: str, port: int) -> socket.socket:
    """A bound TCP socket that does not listen yet, so that nobody connects before there is an answer.

    Raises:
        SpecdecError: the address is in use, not ours, or not to be had.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise SpecdecError(f"--host ({host}) is no address of this machine: {error}") from error
    family, kind, protocol, _, address = found[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise SpecdecError(
            f"{host}:{port} cannot be listened on: {error.strerror or error}; choose another --port or --host"
        ) from error
    bound.setblocking(False)
    return bound


def url_of(bound: socket.socket, *, tls: bool) -> str:
    """Where clients find it."""
    host, port = bound.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    return f"{'https' if tls else 'http'}://{shown}:{port}"
