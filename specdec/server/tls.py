"""Certificate and key of an https server. Imports nothing heavy."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from specdec.errors import SpecdecError


@dataclass(frozen=True, kw_only=True)
class TlsFiles:
    """Certificate and key, as uvicorn takes them."""

    certfile: Path | None = None
    keyfile: Path | None = None
    keyfile_password: str | None = None

    def check(self) -> None:
        """Load them once.

        Raises:
            SpecdecError: a key without certificate, or files that are none.
        """
        if self.certfile is None:
            if self.keyfile is not None or self.keyfile_password is not None:
                raise SpecdecError("--ssl-keyfile needs --ssl-certfile")
            return
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
                self.certfile, self.keyfile, lambda: self.keyfile_password or ""
            )
        except (OSError, ssl.SSLError, ValueError) as error:
            raise SpecdecError(
                f"--ssl-certfile ({self.certfile}) and --ssl-keyfile cannot be used: "
                f"{(error.strerror if isinstance(error, OSError) else None) or error}"
            ) from error
