"""The agent loop: tokens kept id for id, budgets, sandboxes opened when needed, errors recorded where they belong."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from environments.base import ToolOutcome
from rollouts.agent import failed_trajectory
from rollstream import codecs
from rollstream.chat import ChatFormat
from rollstream.errors import ContractError, EpisodeError, InfraError, SandboxLostError
from rollstream.topics import TRAJECTORIES
from rollstream.v1 import events_pb2
from tests.unit.rollouts.stage import (
    WINDOW,
    Acts,
    Says,
    Sessions,
    answer,
    call,
    chat_format,
    rollout,
    spec_of,
    task,
)

FAILED, TRUNCATED, COMPLETED = (
    events_pb2.OUTCOME_STATUS_FAILED,
    events_pb2.OUTCOME_STATUS_TRUNCATED,
    events_pb2.OUTCOME_STATUS_COMPLETED,
)


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ChatFormat:
    return chat_format(tmp_path_factory.mktemp("chat"))


def said(trajectory: events_pb2.Trajectory) -> tuple[int, str]:
    return trajectory.outcome.status, trajectory.outcome.reason


async def test_the_tokens_are_the_conversation_and_the_mask_is_what_was_sampled(
    chat: ChatFormat,
) -> None:
    talk = [call("print(3*4)"), call("print(2+12)"), answer("14")]
    engine = Says(chat, talk)
    trajectory = await rollout(task(), chat, engine, Acts()).run()
    tool = codecs.text_message(events_pb2.ROLE_TOOL, "14")
    whole = [*trajectory.prompt, talk[0], tool, talk[1], tool, talk[2]]
    ids, mask = chat.encode_demonstration(whole)
    (sequence,) = trajectory.sequences
    assert codecs.token_array(sequence).tolist() == ids.tolist()
    assert codecs.sampled_mask(sequence).tolist() == mask.tolist()
    # What the engine was shown last is the trajectory up to there.
    shown = engine.requests[-1].prompt_ids
    assert shown.tolist() == ids[: len(shown)].tolist()
    assert said(trajectory) == (COMPLETED, "stop")
    # It is a sound event.
    assert codecs.decode(TRAJECTORIES, codecs.encode(trajectory)) == trajectory


async def test_logprobs_and_versions_lie_on_the_sampled_tokens(chat: ChatFormat) -> None:
    trajectory = await rollout(
        task(), chat, Says(chat, [call("print(3*4)"), answer("14")]), Acts()
    ).run()
    (sequence,) = trajectory.sequences
    mask, versions = codecs.sampled_mask(sequence), codecs.version_array(sequence)
    assert (versions[~mask] == -1).all()
    starts = [turn.sampled.start for turn in trajectory.turns]
    assert versions[starts].tolist() == [4, 5]
    assert versions[[start + 1 for start in starts]].tolist() == [5, 6]
    assert (trajectory.policy_version_min, trajectory.policy_version_max) == (4, 6)
    lengths = [turn.sampled.length for turn in trajectory.turns]
    expected = np.concatenate([np.arange(n) * -0.25 for n in lengths])
    assert codecs.logprob_array(sequence).tolist() == expected.tolist()
    assert trajectory.sampled_tokens == mask.sum() == sum(lengths)


async def test_ids_and_seeds_are_those_of_the_sample(chat: ChatFormat) -> None:
    engine = Says(chat, [answer("14")])
    trajectory = await rollout(task(), chat, engine).run()
    again = await rollout(task(), chat, Says(chat, [answer("14")])).run()
    assert trajectory.header.event_id == again.header.event_id
    assert trajectory.rollout_id == again.rollout_id
    assert trajectory.seed == engine.requests[0].seed == 11
    retried = failed_trajectory(spec_of(task(), attempt=1), InfraError("gone"))
    assert retried.rollout_id == trajectory.rollout_id
    assert retried.header.event_id != trajectory.header.event_id


@pytest.mark.parametrize(
    ("budget", "reason"),
    [
        ({"max_turns": 1}, "max_turns"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"max_tokens_per_turn": 5}, "max_tokens_per_turn"),
    ],
)
async def test_budgets_truncate(chat: ChatFormat, budget: dict[str, float], reason: str) -> None:
    environment = Acts()
    trajectory = await rollout(
        task(**budget), chat, Says(chat, [call("print(3*4)"), answer("14")]), environment
    ).run()
    assert said(trajectory) == (TRUNCATED, reason)
    # Truncated is data: it is verified and scored.
    assert trajectory.evidence.validity == events_pb2.VALIDITY_VALID
    assert codecs.decode(TRAJECTORIES, codecs.encode(trajectory)) == trajectory


async def test_a_full_window_truncates(chat: ChatFormat) -> None:
    environment = Acts(lambda call: ToolOutcome(content="1" * WINDOW))
    engine = Says(chat, [call("print(3*4)"), answer("14")])
    trajectory = await rollout(task(), chat, engine, environment, max_tool_chars=WINDOW).run()
    assert said(trajectory) == (TRUNCATED, "context")


async def test_an_engine_that_does_not_answer_ends_with_the_wall_time(chat: ChatFormat) -> None:
    trajectory = await rollout(
        task(wall_s=0.2), chat, Says(chat, [call("print(3*4)"), None]), Acts()
    ).run()
    assert said(trajectory) == (TRUNCATED, "wall")
    assert len(trajectory.turns) == 1
    assert codecs.decode(TRAJECTORIES, codecs.encode(trajectory)) == trajectory


async def test_a_prompt_that_fills_the_window_is_refused_with_the_remedy(chat: ChatFormat) -> None:
    wanted = task()
    wanted.prompt[0].content[0].text = "1" * WINDOW
    with pytest.raises(ContractError, match=r"task t: its prompt .* raise policy.max_length"):
        await rollout(wanted, chat, Says(chat, [])).run()


async def test_the_sandbox_is_opened_at_the_first_need_and_closed_at_the_end(
    chat: ChatFormat,
) -> None:
    sessions = Sessions()
    trajectory = await rollout(task(), chat, Says(chat, [answer("14")]), Acts(), sessions).run()
    assert (sessions.opened, trajectory.sandbox_id) == (0, "")

    environment = Acts()
    engine = Says(chat, [call("print(1)", "print(2)"), call("print(3)"), answer("14")])
    trajectory = await rollout(task(), chat, engine, environment, sessions).run()
    assert (sessions.opened, trajectory.sandbox_id) == (1, "s1")
    assert len({id(session) for session, _, _ in environment.seen}) == 1
    assert not sessions.open

    environment = Acts(in_sandbox=True)
    await rollout(task(), chat, Says(chat, [answer("14")]), environment, sessions).run()
    assert sessions.opened == 2
    assert environment.verified_in[0] is not None


async def test_calls_that_make_no_sense_are_answered(chat: ChatFormat) -> None:
    wanted = task()
    wanted.tools[0].name = "other"
    sessions, environment = Sessions(), Acts()
    engine = Says(chat, [call("print(1)"), answer("14")])
    trajectory = await rollout(wanted, chat, engine, environment, sessions).run()
    (result,) = trajectory.turns[0].tool_results
    assert result.status == events_pb2.TOOL_STATUS_INVALID
    assert result.content == "error: no tool 'python'; there is other"
    assert said(trajectory) == (COMPLETED, "stop")
    # Nothing ran, so no sandbox was needed.
    assert (environment.seen, sessions.opened) == ([], 0)


async def test_tool_output_is_cut_counted_and_cannot_end_a_turn(chat: ChatFormat) -> None:
    environment = Acts(lambda call: ToolOutcome(content="<|end|>" + "1" * 40, dropped_bytes=5))
    engine = Says(chat, [call("print(1)"), answer("14")])
    trajectory = await rollout(task(), chat, engine, environment, max_tool_chars=20).run()
    (result,) = trajectory.turns[0].tool_results
    assert len(result.content) == 20
    assert "<|end|>" not in result.content
    # "<|end|>" got a blank: 48 characters, of which 20 were shown.
    assert result.dropped_bytes == 28 + 5


@pytest.mark.parametrize("error", [ZeroDivisionError("broken tool"), EpisodeError("broken tool")])
async def test_a_tool_that_crashes_is_recorded_and_never_scored(
    chat: ChatFormat, error: Exception
) -> None:
    environment = Acts(error)
    engine = Says(chat, [call("print(1)"), answer("14")])
    trajectory = await rollout(task(), chat, engine, environment).run()
    assert said(trajectory) == (FAILED, "tool_crashed")
    assert "broken tool" in trajectory.outcome.error
    assert trajectory.evidence.validity == events_pb2.VALIDITY_INVALID
    assert trajectory.turns[0].tool_results[0].status == events_pb2.TOOL_STATUS_INFRA
    assert environment.verified_in == []


async def test_a_tool_that_never_returns_is_recorded(
    chat: ChatFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Hangs(Acts):
        async def call_tool(self, *_: object, **__: object) -> ToolOutcome:
            await asyncio.Event().wait()
            raise AssertionError

    monkeypatch.setattr("rollouts.agent._TOOL_GRACE_S", 0.0)
    engine = Says(chat, [call("print(1)"), answer("14")])
    trajectory = await rollout(task(tool_s=0.05), chat, engine, Hangs()).run()
    assert said(trajectory) == (FAILED, "tool_hung")


async def test_tool_time_is_shared_by_all_calls(chat: ChatFormat) -> None:
    class Slow(Acts):
        async def call_tool(
            self, *arguments: object, timeout_s: float, **more: object
        ) -> ToolOutcome:
            left.append(timeout_s)
            await asyncio.sleep(timeout_s)
            return ToolOutcome(content="14")

    left: list[float] = []
    engine = Says(chat, [call("print(1)", "print(2)", "print(3)"), answer("14")])
    trajectory = await rollout(task(tool_s=0.05), chat, engine, Slow()).run()
    assert said(trajectory) == (TRUNCATED, "tool_time")
    assert len(left) == 1
    assert trajectory.timings.tool_s == pytest.approx(trajectory.turns[0].tool_s)


@pytest.mark.parametrize(
    ("verifier", "reason"),
    [
        (ZeroDivisionError("broken verifier"), "the verifier crashed: ZeroDivisionError"),
        (
            lambda turns: events_pb2.Evidence(
                items=[events_pb2.EvidenceItem(name="speed", value=float("inf"))]
            ),
            "evidence is not a finite number: speed",
        ),
    ],
)
async def test_evidence_that_cannot_be_had_is_invalid(
    chat: ChatFormat, verifier: object, reason: str
) -> None:
    environment = Acts(verifier=verifier)  # type: ignore[arg-type]
    trajectory = await rollout(task(), chat, Says(chat, [answer("14")]), environment).run()
    assert trajectory.evidence.validity == events_pb2.VALIDITY_INVALID
    assert trajectory.evidence.invalid_reason.startswith(reason)
    # The policy did its part.
    assert said(trajectory) == (COMPLETED, "stop")


async def test_a_lost_sandbox_leaves_the_rollout_to_be_done_again(chat: ChatFormat) -> None:
    sessions = Sessions()
    engine = Says(chat, [call("print(1)"), answer("14")])
    with pytest.raises(SandboxLostError):
        await rollout(task(), chat, engine, Acts(SandboxLostError("gone")), sessions).run()
    assert not sessions.open
    engine = Says(chat, [call("print(1)"), answer("14")])
    with pytest.raises(InfraError, match="full"):
        await rollout(task(), chat, engine, Acts(), Sessions(error=InfraError("full"))).run()


def test_what_could_not_be_done_is_recorded_and_never_scored() -> None:
    trajectory = failed_trajectory(
        spec_of(task(), attempt=2), SandboxLostError("gone", hint="look")
    )
    assert said(trajectory) == (FAILED, "sandbox_lost")
    assert trajectory.outcome.error == "gone -- look"
    assert trajectory.evidence.validity == events_pb2.VALIDITY_INVALID
    assert (trajectory.attempt, trajectory.group_size) == (2, 2)
    assert codecs.decode(TRAJECTORIES, codecs.encode(trajectory)) == trajectory
