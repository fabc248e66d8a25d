"""Writes ``requirements/*.txt`` from ``requirements/*.in``: exact versions with their hashes.

The ``.in`` files name every package, those that others need included (``--no-deps``): what is
installed is what was tested together. Wheels of all Pythons from 3.11 on are in the hashes.
"""

from __future__ import annotations

import subprocess
import sys

from setup import BIN, REQUIREMENTS, pip_settings, uv_environment

OPTIONS = (
    "--universal", "--no-deps", "--generate-hashes", "--no-header", "--no-annotate", "-q",
    "--python-version", "3.11",
)  # fmt: skip


def main() -> int:
    environment = uv_environment(pip_settings())
    for source in sorted(REQUIREMENTS.glob("*.in")):
        target = source.with_suffix(".txt")
        command = [str(BIN / "uv"), "pip", "compile", *OPTIONS, str(source), "-o", str(target)]
        done = subprocess.run(command, check=False, env=environment)
        if done.returncode:
            return done.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
