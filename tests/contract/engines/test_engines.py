"""One suite for all engines: what the contract in rollouts/engines/base.py says."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from rollouts.engines.base import GenerateRequest, InferenceEngine
from rollouts.engines.factory import make_engine
from rollouts.engines.scripted import ScriptedEngine
from rollstream.config import Config, load
from rollstream.errors import ConfigError, ContractError, InfraError, RollstreamError
from rollstream.v1 import events_pb2
from trainer.model import load_model, prepare_start, write_policy

WINDOW = 96
KINDS = ("light", pytest.param("vllm", marks=pytest.mark.vllm))
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    folder = tmp_path_factory.mktemp("engines")
    return load(
        overrides=[
            f'run.dir="{folder}"',
            'domains=[{name="d", environment="demo-arithmetic"}]',
            f"policy.max_length={WINDOW}",
            (
                'policy.model={tokenizer_domain="d", hidden_size=64, intermediate_size=128, layers=2,'
                " heads=2, kv_heads=1, head_dim=32}"
            ),
            "rollouts.engine.max_sequences=16",
        ],
        environ={},
    )


@pytest.fixture(scope="module")
def models(config: Config) -> Iterator[list[tuple[torch.nn.Module, Path]]]:
    """Two versions of a policy: modules, and their folders."""
    torch.set_num_threads(1)
    start = prepare_start(config, config.run.dir / "start")
    made = []
    for version in range(2):
        model = load_model(start, torch.device("cpu")).eval()
        if version:
            torch.manual_seed(1)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.05 * torch.randn_like(parameter))
        folder = config.run.dir / f"version-{version}"
        write_policy(model, start, folder, dtype="float32")
        made.append((model, folder))
    yield made


@pytest.fixture(scope="module", params=KINDS)
async def engine(
    request: pytest.FixtureRequest, config: Config, models: list[tuple[torch.nn.Module, Path]]
) -> AsyncIterator[InferenceEngine]:
    rollouts = config.rollouts
    settings = rollouts.engine.model_copy(update={"kind": request.param})
    chosen = config.model_copy(
        update={"rollouts": rollouts.model_copy(update={"engine": settings})}
    )
    made = make_engine(chosen)
    await made.start(models[0][1], version=0)
    yield made
    await made.stop()


def ask(
    prompt: list[int], *, tokens: int = 24, temperature: float = 1.0, stops: tuple[int, ...] = ()
) -> GenerateRequest:
    return GenerateRequest(
        prompt_ids=np.array(prompt, dtype=np.int32),
        max_tokens=tokens,
        temperature=temperature,
        stop_ids=stops,
    )


def exact(model: torch.nn.Module, prompt: list[int], sampled: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
    """Log-probabilities of ``sampled`` by a plain forward pass."""
    ids = torch.tensor([prompt + sampled.tolist()])
    with torch.no_grad():
        full = model(ids).logits[0].log_softmax(-1)
    at = torch.arange(len(prompt) - 1, len(prompt) - 1 + len(sampled))
    return full[at, torch.from_numpy(sampled).long()].numpy()


async def back_to_version_0(engine: InferenceEngine, models: list) -> None:  # type: ignore[type-arg]
    if engine.version != 0:
        await engine.update_weights(models[0][1], version=0)


async def test_logprobs_are_those_of_the_model(engine: InferenceEngine, models) -> None:  # type: ignore[no-untyped-def]
    await back_to_version_0(engine, models)
    prompts = [[1, 9 + i, 10, 4, 2] for i in range(12)]
    answers = await asyncio.gather(*(engine.generate(ask(p)) for p in prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        np.testing.assert_allclose(
            answer.logprobs, exact(models[0][0], prompt, answer.token_ids), atol=2e-5
        )
        assert answer.versions == ((0, 0, len(answer.token_ids)),)


async def test_greedy_is_the_arg_max(engine: InferenceEngine, models) -> None:  # type: ignore[no-untyped-def]
    await back_to_version_0(engine, models)
    prompt = [1, 12, 13, 4, 2]
    for _ in range(2):
        answer = await engine.generate(ask(prompt, temperature=0.0, tokens=12))
        ids = list(prompt)
        for token in answer.token_ids.tolist():
            with torch.no_grad():
                logits = models[0][0](torch.tensor([ids])).logits[0, -1]
            # Two ids of nearly the same logit may change places with the order of a sum.
            assert float(logits[token]) > float(logits.max()) - 1e-4
            ids.append(token)


async def test_limits_and_stops(engine: InferenceEngine, models) -> None:  # type: ignore[no-untyped-def]
    await back_to_version_0(engine, models)
    prompt = [1, 12, 13, 4, 2]
    greedy = await engine.generate(ask(prompt, temperature=0.0, tokens=8))
    stop = int(greedy.token_ids[2])
    cut = await engine.generate(ask(prompt, temperature=0.0, tokens=8, stops=(stop,)))
    assert cut.finish_reason == events_pb2.FINISH_REASON_STOP
    # The stop id is kept.
    assert cut.token_ids.tolist() == greedy.token_ids[: len(cut.token_ids)].tolist()
    assert cut.token_ids[-1] == stop
    one = await engine.generate(ask(prompt, tokens=1))
    assert len(one.token_ids) == 1
    with pytest.raises(ContractError, match=rf"{WINDOW} tokens does not fit a window of {WINDOW}"):
        await engine.generate(ask([7] * WINDOW))
    # A window that is nearly full is filled and no further.
    full = await engine.generate(ask([7] * (WINDOW - 3), tokens=50))
    assert len(full.token_ids) <= 3


async def test_weights_change_in_flight_at_a_token_boundary(
    engine: InferenceEngine, models
) -> None:  # type: ignore[no-untyped-def]
    await back_to_version_0(engine, models)
    prompts = [[1, 9 + i, 4, 2] for i in range(6)]
    # Many short rounds: some request is in flight when the weights change.
    for _ in range(20):
        await back_to_version_0(engine, models)
        running = [asyncio.create_task(engine.generate(ask(p, tokens=88))) for p in prompts]
        while not engine.stats()["running_requests"]:
            await asyncio.sleep(0.001)
        await engine.update_weights(models[1][1], version=1)
        answers = await asyncio.gather(*running)
        mixed = [a for a in answers if len(a.versions) == 2]
        if mixed:
            break
    assert mixed
    for answer in mixed:
        (first, start, length), (second, then, rest) = answer.versions
        assert (first, start, second) == (0, 0, 1)
        assert (then, length + rest) == (length, len(answer.token_ids))
    after = await engine.generate(ask(prompts[0]))
    np.testing.assert_allclose(
        after.logprobs, exact(models[1][0], prompts[0], after.token_ids), atol=2e-5
    )


async def test_broken_weights_leave_the_old_ones(
    engine: InferenceEngine, models, tmp_path: Path
) -> None:  # type: ignore[no-untyped-def]
    await back_to_version_0(engine, models)
    (tmp_path / "model.safetensors").write_bytes(b"not a tensor")
    with pytest.raises(RollstreamError, match="cannot be read"):
        await engine.update_weights(tmp_path, version=5)
    assert engine.version == 0
    prompt = [1, 20, 4, 2]
    answer = await engine.generate(ask(prompt))
    np.testing.assert_allclose(
        answer.logprobs, exact(models[0][0], prompt, answer.token_ids), atol=2e-5
    )


async def test_logprobs_are_those_of_what_was_sampled_from(engine: InferenceEngine, models) -> None:  # type: ignore[no-untyped-def]
    await back_to_version_0(engine, models)
    prompt = [1, 12, 13, 4, 2]
    answer = await engine.generate(ask(prompt, temperature=0.5))
    ids = torch.tensor([prompt + answer.token_ids.tolist()])
    with torch.no_grad():
        cooled = (models[0][0](ids).logits[0] / 0.5).log_softmax(-1)
    at = torch.arange(len(prompt) - 1, ids.shape[1] - 1)
    expected = cooled[at, torch.from_numpy(answer.token_ids).long()].numpy()
    np.testing.assert_allclose(answer.logprobs, expected, atol=2e-5)
    # Of one candidate, there is no choice.
    only = await engine.generate(dataclasses.replace(ask(prompt), top_k=1))
    np.testing.assert_allclose(only.logprobs, 0.0, atol=2e-5)


async def test_a_cached_prefix_is_not_used_under_new_weights(
    engine: InferenceEngine, models
) -> None:  # type: ignore[no-untyped-def]
    await back_to_version_0(engine, models)
    # Two blocks and more.
    prompt = [7 + i % 40 for i in range(70)]
    for version in (0, 1):
        if version:
            await engine.update_weights(models[1][1], version=1)
        for _ in range(2):
            answer = await engine.generate(ask(prompt, tokens=8))
            np.testing.assert_allclose(
                answer.logprobs,
                exact(models[version][0], prompt, answer.token_ids),
                atol=2e-5,
            )


async def test_weights_of_another_model_are_refused(
    engine: InferenceEngine, models, tmp_path: Path
) -> None:  # type: ignore[no-untyped-def]
    await back_to_version_0(engine, models)
    state = {name: tensor.clone() for name, tensor in models[1][0].state_dict().items()}
    del state["model.norm.weight"]
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(ContractError, match=r"1 tensors differ, first model.norm.weight"):
        await engine.update_weights(tmp_path, version=5)
    assert engine.version == 0
    prompt = [1, 20, 4, 2]
    answer = await engine.generate(ask(prompt))
    np.testing.assert_allclose(
        answer.logprobs, exact(models[0][0], prompt, answer.token_ids), atol=2e-5
    )
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(InfraError, match="holds no"):
        await engine.update_weights(tmp_path, version=5)


@pytest.mark.parametrize("prompt", [[], [1, 10_000]])
async def test_a_request_that_cannot_be_served_is_refused_alone(
    engine: InferenceEngine,
    models,  # type: ignore[no-untyped-def]
    prompt: list[int],
) -> None:
    other = asyncio.create_task(engine.generate(ask([1, 20, 4, 2])))
    with pytest.raises(ContractError):
        await engine.generate(ask(prompt))
    assert len((await other).token_ids) == 24


async def test_a_cancelled_request_gives_its_place_back(engine: InferenceEngine, models) -> None:  # type: ignore[no-untyped-def]
    """More are cancelled than there are places; those that follow are served all the same."""
    for _ in range(3):
        tasks = [
            asyncio.create_task(engine.generate(ask([1, 9, 4, 2], tokens=90))) for _ in range(24)
        ]
        while not engine.stats()["running_requests"]:
            await asyncio.sleep(0.001)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    answers = await asyncio.gather(*(engine.generate(ask([1, 9 + i, 4, 2])) for i in range(24)))
    assert [len(answer.token_ids) for answer in answers] == [24] * 24


def echo(request: GenerateRequest) -> np.ndarray:  # type: ignore[type-arg]
    return np.array([5, 6, 7, 8], dtype=np.int32)


async def test_the_scripted_engine_says_its_script(config: Config) -> None:
    rollouts = config.rollouts
    script = f"{echo.__module__}:echo"
    settings = rollouts.engine.model_copy(update={"kind": "scripted", "script": script})
    chosen = config.model_copy(
        update={"rollouts": rollouts.model_copy(update={"engine": settings})}
    )
    engine = ScriptedEngine(chosen)
    await engine.start(Path("nowhere"), version=3)
    answer = await engine.generate(ask([1], stops=(7,)))
    assert answer.token_ids.tolist() == [5, 6, 7]
    assert answer.finish_reason == events_pb2.FINISH_REASON_STOP
    assert answer.versions == ((3, 0, 3),)
    cut = await engine.generate(ask([1], tokens=2))
    assert (cut.token_ids.tolist(), cut.finish_reason) == ([5, 6], events_pb2.FINISH_REASON_LENGTH)


async def test_unknown_scripts_are_named(config: Config) -> None:
    rollouts = config.rollouts
    settings = rollouts.engine.model_copy(update={"kind": "scripted", "script": "nowhere:f"})
    chosen = config.model_copy(
        update={"rollouts": rollouts.model_copy(update={"engine": settings})}
    )
    with pytest.raises(ConfigError, match="nowhere:f"):
        make_engine(chosen)
