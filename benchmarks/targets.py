"""Every figure that this project is held against, with one command.

    python benchmarks/targets.py --json results.json --plot plots

The same as `swa-compile bench --targets`. Rows are written as they are done; with --resume a run
goes on where another one stopped, and --budget SECONDS stops in time.
"""

from __future__ import annotations

import sys

from swa_compile.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "--targets", *sys.argv[1:]]))
