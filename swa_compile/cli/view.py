"""`swa-compile view DIR`: dumps in the browser."""

from __future__ import annotations

import argparse
import threading
import webbrowser
from pathlib import Path
from typing import Any

from swa_compile.cli.errors import UsageError


def add_parser(commands: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        "view",
        help="show dumps in the browser",
        description="Serve the pages of dumps on this machine (127.0.0.1 only) until Ctrl-C. Each "
        "page is also a file, index.html in the graph's folder, that opens by itself.",
    )
    parser.add_argument("dir", metavar="DIR", help="a dump directory, a process's or a graph's")
    parser.add_argument("--port", type=int, default=0, help="default: any free one")
    parser.add_argument("--no-open", action="store_true", help="only print the address")
    return parser


def run(args: argparse.Namespace) -> None:
    """Serve until interrupted.

    Raises:
        UsageError: where DIR holds no dump, or the port cannot be had.
    """
    from swa_compile.viewer.dump import graph_folders
    from swa_compile.viewer.serve import ADDRESS, serve

    root = Path(args.dir)
    if not root.is_dir():
        raise UsageError(f"there is no folder {root}")
    found = len(graph_folders(root))
    if not found:
        raise UsageError(
            f"no graph was dumped below {root}; compile with options={{'dump_dir': ...}} or "
            "SWA_COMPILE_DUMP=..."
        )
    try:
        server = serve(root, args.port)
    except (OSError, OverflowError) as error:
        raise UsageError(f"port {args.port} cannot be had: {error}") from error
    address = f"http://{ADDRESS}:{server.server_port}/"
    print(f"{found} graph{'s' * (found != 1)} at {address}  (Ctrl-C ends)", flush=True)
    with server:
        if not args.no_open:
            # A browser in the terminal takes the thread until one leaves it, and asks meanwhile.
            threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
