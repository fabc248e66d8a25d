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
        committed = sorted((ROOT / "rollstream/v1").glob("*_pb2*.py*"))
        for old in committed:
            new = fresh / old.name
            if not new.exists() or new.read_bytes() != old.read_bytes():
                print(f"error: {old.name} is not what protos/ says -- run `make protos`")
                return 1
        for source in sources:
            if ROOT / f"rollstream/v1/{source.stem}_pb2.py" not in committed:
                print(f"error: {source.name} has no generated code -- run `make protos`")
                return 1
    return 0


def lint() -> int:
    return subprocess.run([str(BUF), "lint"], cwd=PROTOS, check=False).returncode


def breaking() -> int:
    """Against the last release, and against the version of the protos before this one."""
    for ref in filter(None, (last_release(), version_before())):
        against = f"{ROOT / '.git'}#ref={ref},subdir=protos"
        command = [str(BUF), "breaking", "--against", against]
        if subprocess.run(command, cwd=PROTOS, check=False).returncode:
            print(f"error: readers of {ref} would break -- add fields, do not change them")
            return 1
    return 0


def last_release() -> str:
    return git("describe", "--tags", "--abbrev=0", "--match", "v[0-9]*")


def version_before() -> str:
    """The last commit while the protos are being changed, else the one before their last change:
    a fresh clone has something to compare as well. Empty where there is none.
    """
    if git("status", "--porcelain", "--", "protos"):
        return git("rev-parse", "--verify", "--quiet", "HEAD")
    changed = git("log", "-1", "--format=%H", "--", "protos")
    before = git("rev-parse", "--verify", "--quiet", f"{changed}~1") if changed else ""
    there = git("ls-tree", "-r", "--name-only", before, "protos/") if before else ""
    return before if "buf.yaml" in there else ""


def git(*arguments: str) -> str:
    """What git says; empty when it cannot (no repository, a shallow one, no such thing)."""
    done = subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() if done.returncode == 0 else ""


if __name__ == "__main__":
    sys.exit(main())
