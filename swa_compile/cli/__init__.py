"""The command `swa-compile`.

Exit codes: 0 fine, 1 a check failed, 2 wrong usage. An error is one line; `--debug` (ahead of the
subcommand or behind it) shows the traceback.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from swa_compile import __version__
from swa_compile.cli import bench, demo, diff, doctor, explain, generate, view
from swa_compile.cli.errors import CheckFailed, UsageError

_COMMANDS = (demo, generate, explain, view, diff, bench, doctor)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's); the exit code."""
    parser = _parser()
    args = parser.parse_args(argv)  # exits with 2 on wrong usage
    if args.run is None:
        parser.print_help(sys.stderr)
        return 2
    debug = args.debug or args.debug_after
    try:
        args.run(args)
    except UsageError as error:
        return _fail(error, 2, debug)
    except CheckFailed as error:
        return _fail(error, 1, debug)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        return _fail(error, 1, debug)
    return 0


def _fail(error: Exception, code: int, debug: bool) -> int:
    if debug:
        raise error
    lines = [line for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    known = isinstance(error, (UsageError, CheckFailed))
    prefix = "" if known else f"{type(error).__name__}: "
    print(f"swa-compile: error: {prefix}{text}", file=sys.stderr)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="swa-compile",
        description="Hoist full->SWA index translations out of compiled models, and show it.",
    )
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    parser.set_defaults(run=None, debug_after=False)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for command in _COMMANDS:
        sub = command.add_parser(commands)
        sub.add_argument("--debug", action="store_true", dest="debug_after", help="show tracebacks")
        sub.set_defaults(run=command.run)
    return parser
