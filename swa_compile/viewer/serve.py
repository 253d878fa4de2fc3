"""A server of dump pages on this machine's loopback address."""

from __future__ import annotations

import sys
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from swa_compile.passes.reading import read_text
from swa_compile.viewer.dump import PAGE, Dump, graph_folders, is_graph_folder
from swa_compile.viewer.overview import overview
from swa_compile.viewer.page import page

ADDRESS = "127.0.0.1"


def serve(root: Path, port: int = 0) -> ThreadingHTTPServer:
    """A server, not started, of the pages of the dumps at or below `root`; call `serve_forever`.

    Pages are made when they are asked for, so that a graph dumped later is there on reloading, and
    dumps that have no page of their own (of the passes alone) get one.

    Args:
        root: a graph's folder, a process's, or a dump directory.
        port: 0 for any free one; `server_port` says which.

    Raises:
        OSError: where the port is taken.
    """
    return _Server((ADDRESS, port), partial(_Handler, root.resolve()))


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):  # who asked has gone: no matter
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server_version = "swa-compile"

    def __init__(self, root: Path, *args: object) -> None:
        self.root = root
        super().__init__(*args)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        # A page of another site must not read dumps through a name that it points here.
        host = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
        if host not in (ADDRESS, "localhost"):
            return self._send(HTTPStatus.FORBIDDEN, "text/plain", f"asked for as {host!r}")
        try:
            path = unquote(urlsplit(self.path).path, errors="surrogateescape")
            text, kind = self._find(path)
        except Exception as error:  # a dump that somebody edited, say
            text = str(error) if isinstance(error, (OSError, ValueError)) else repr(error)
            return self._send(HTTPStatus.INTERNAL_SERVER_ERROR, "text/plain", text)
        if text is None:
            return self._send(HTTPStatus.NOT_FOUND, "text/plain", "there is no such dump")
        self._send(HTTPStatus.OK, kind, text)

    def _find(self, path: str) -> tuple[str | None, str]:
        name = path.strip("/").removesuffix(PAGE).strip("/")
        if "\0" in name:
            return None, ""
        place = (self.root / name).resolve()
        if place != self.root and self.root not in place.parents:
            return None, ""
        if is_graph_folder(place):
            return page(Dump.read(place)), "text/html"
        if place.is_dir() and (name == "" or graph_folders(place)):
            return overview(place, f"/{name}/" if name else ""), "text/html"
        if place.is_file() and is_graph_folder(place.parent):
            return read_text(place), "text/plain"
        return None, ""

    def _send(self, status: HTTPStatus, kind: str, text: str) -> None:
        data = text.encode("utf-8", "backslashreplace")  # names of files may be no text
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        del format, args  # a page a line would push the address out of sight
