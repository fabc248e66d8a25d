"""The wire contract: generated code is what the protos say, buf finds no fault, nothing breaks
readers.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUF = Path(sys.executable).parent / "buf"
PROTOS = ROOT / "protos"


def main() -> int:
    return generated_is_current() or lint() or breaking()


def generated_is_current() -> int:
    sources = sorted(PROTOS.glob("rollstream/v1/*.proto"))
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTOS}"]
        command += [f"--python_out={folder}", f"--pyi_out={folder}", f"--grpc_python_out={folder}"]
        subprocess.run([*command, *map(str, sources)], check=True)
        fresh = Path(folder, "rollstream/v1")
        for committed in sorted((ROOT / "rollstream/v1").glob("*_pb2*.py*")):
            if (fresh / committed.name).read_bytes() != committed.read_bytes():
                print(f"error: {committed.name} is not what protos/ says -- run `make protos`")
                return 1
    return 0


def lint() -> int:
    return subprocess.run([str(BUF), "lint"], cwd=PROTOS, check=False).returncode


def breaking() -> int:
    """Against the last commit; a first commit has nothing to break."""
    known = subprocess.run(
        ["git", "ls-tree", "-r", "--name-only", "HEAD", "protos/"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    ).stdout
    if "buf.yaml" not in known:
        return 0
    against = f"{ROOT / '.git'}#ref=HEAD,subdir=protos"
    return subprocess.run(
        [str(BUF), "breaking", "--against", against], cwd=PROTOS, check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
