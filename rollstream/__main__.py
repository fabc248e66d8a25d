"""``python -m rollstream`` is ``rollstream``."""

import sys

from rollstream.cli import main

if __name__ == "__main__":
    sys.exit(main())
