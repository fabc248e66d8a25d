"""Configuration: precedence, errors that name key, value and remedy, round trip."""

from __future__ import annotations

from pathlib import Path

import pytest

from producers.main import Producers
from rollstream.config import dump, load
from rollstream.errors import ConfigError
from rollstream.lifecycle import main


def _write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_precedence_defaults_file_environment_overrides(tmp_path: Path) -> None:
    first = _write(tmp_path / "a.toml", "[bus]\nlinger_ms = 1\npartitions = 7\n[run]\nseed = 1\n")
    second = _write(tmp_path / "b.toml", "[bus]\nlinger_ms = 2\n")
    environ = {"ROLLSTREAM__BUS__LINGER_MS": "3", "ROLLSTREAM__RUN__ID": "from-env"}
    assert load(environ={}).bus.linger_ms == 5
    assert load([first, second], environ={}).bus.linger_ms == 2
    assert load([first, second], environ=environ).bus.linger_ms == 3
    config = load([first, second], overrides=["bus.linger_ms=4"], environ=environ)
    assert (config.bus.linger_ms, config.bus.partitions) == (4, 7)
    assert (config.run.seed, config.run.id) == (1, "from-env")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("bus.partition=3", "unknown key 'bus.partition'; did you mean 'partitions'"),
        ("buss.x=1", "unknown key 'buss'; did you mean 'bus'"),
        ("bus.linger_ms=-1", r"bus.linger_ms: .*greater than or equal to 0.*got -1"),
        ("bus.compression=zip", r"bus.compression: .*'zstd'.*got 'zip'"),
        ("nonsense", "is not KEY=VALUE"),
        ("run.seed.deep=1", "is a value, not a section|run.seed"),
    ],
)
def test_errors_name_key_value_and_remedy(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(overrides=[override], environ={})


def test_unknown_keys_in_lists_and_unions_name_the_nearest() -> None:
    domain = 'domains=[{name="a", environment="x", wieght=2}]'
    with pytest.raises(ConfigError, match="did you mean 'weight'"):
        load(overrides=[domain], environ={})
    stages = 'trainer.stages=[{kind="rl", stepz=2}]'
    with pytest.raises(ConfigError, match="did you mean 'steps'"):
        load(overrides=[stages], environ={})


def test_list_items_are_overridden_by_index() -> None:
    domains = 'domains=[{name="a", environment="x"}, {name="b", environment="x"}]'
    config = load(overrides=[domains, "domains.1.weight=3"], environ={})
    assert [d.weight for d in config.domains] == [1.0, 3.0]


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing.toml does not exist"):
        load([tmp_path / "nothing.toml"], environ={})
    with pytest.raises(ConfigError, match=r"broken.toml cannot be read"):
        load([_write(tmp_path / "broken.toml", "a = [")], environ={})


@pytest.mark.parametrize(
    "override",
    [
        'domains=[{name="a", environment="x"}, {name="a", environment="y"}]',
        'trainer.stages=[{kind="sft", domain="nowhere"}]',
        'evaluation.domains=["nowhere"]',
        'domains=[{name="a", environment="x", reward={components=[]}}]',
    ],
)
def test_contradictions_are_refused(override: str) -> None:
    with pytest.raises(ConfigError):
        load(overrides=[override], environ={})


def test_what_is_dumped_loads_to_the_same(tmp_path: Path) -> None:
    demo = Path(__file__).parents[3] / "rollstream" / "demo" / "demo.toml"
    config = load([demo], overrides=["run.seed=9"], environ={})
    assert load([_write(tmp_path / "c.toml", dump(config))], environ={}) == config


def test_the_examples_load() -> None:
    for file in (Path(__file__).parents[3] / "examples").glob("*.toml"):
        assert load([file], environ={}).domains


def test_a_service_started_dry_prints_what_it_would_run_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(Producers, ["--set", "bus.linger_ms=9", "--dry-run"]) == 0
    printed = _write(tmp_path / "printed.toml", capsys.readouterr().out)
    assert load([printed], environ={}).bus.linger_ms == 9
