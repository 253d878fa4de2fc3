"""`python -m swa_compile` is `swa-compile`."""

import sys

from swa_compile.cli import main

sys.exit(main())
