"""`python -m freetoken COMMAND`: the same as `ft COMMAND`."""

from __future__ import annotations

import sys

from freetoken.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
