"""Token in, token out: whatever is said, a demonstration is what a rollout of it would hold."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from environments.demo_arithmetic import DemoArithmetic
from rollstream.chat import ChatFormat
from rollstream.chat_template import ChatTemplate, plain_message, read_settings
from rollstream.codecs import text_message, text_of
from rollstream.v1 import events_pb2
from tests.folders import CHATML, SPECIAL, policy_folder

Talk = list[events_pb2.Message]
DEMO_TEXT = st.text("0123456789+-*()abc =.?!\n", min_size=1, max_size=12)
CODE = st.text("0123456789+-*()abc", min_size=1, max_size=12)
ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30)


def said(text: str, code: str | None) -> events_pb2.Message:
    message = events_pb2.Message(role=events_pb2.ROLE_ASSISTANT)
    if text:
        message.content.add(text=text)
    if code is not None:
        message.tool_calls.add(name="python", arguments_json=json.dumps({"code": code}))
    return message


def talks(text: st.SearchStrategy[str], code: st.SearchStrategy[str]) -> st.SearchStrategy[Talk]:
    """A question, calls with their results, an answer."""
    result = st.builds(text_message, st.just(events_pb2.ROLE_TOOL), text)
    step = st.tuples(st.builds(said, st.just(""), code), result)

    def join(question: str, steps: list[tuple[events_pb2.Message, ...]], answer: str) -> Talk:
        ask = text_message(events_pb2.ROLE_USER, question)
        return [ask, *(m for pair in steps for m in pair), said(answer, None)]

    return st.builds(join, text, st.lists(step, max_size=3), text)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> ChatFormat:
    folder = tmp_path_factory.mktemp("demo")
    for name, data in DemoArithmetic().tokenizer().items():
        (folder / name).write_bytes(data)
    return ChatFormat(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return policy_folder(tmp_path_factory.mktemp("chatml"), CHATML)


@pytest.fixture(scope="module")
def hermes(folder: Path) -> ChatFormat:
    return ChatFormat(folder)


def spans(mask: np.ndarray) -> Iterator[slice]:
    """The runs of True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(int), [0]])))
    yield from (slice(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True))


def rollout(chat: ChatFormat, talk: Talk, sampled: list[np.ndarray]) -> np.ndarray:
    """What the agent loop would hold, had it sampled this."""
    parts, turns = [chat.render_prompt(talk[:1], ())], iter(sampled)
    for position in range(1, len(talk), 2):
        parts.append(next(turns))
        results = talk[position + 1 : position + 2]
        if results:
            parts.append(chat.render_continuation(results, closed=True))
    return np.concatenate(parts)


def check(chat: ChatFormat, talk: Talk) -> None:
    ids, mask = chat.encode_demonstration(talk)
    sampled = [ids[span] for span in spans(mask)]
    np.testing.assert_array_equal(rollout(chat, talk, sampled), ids)
    for turn, (ours, meant) in enumerate(zip(sampled, talk[1::2], strict=True)):
        parsed = chat.parse_assistant(ours, turn=turn)
        assert ours[-1] in chat.stop_ids
        assert not set(ours[:-1].tolist()) & set(chat.stop_ids)
        assert text_of(parsed) == text_of(meant)
        assert [c.arguments_json for c in parsed.tool_calls] == [
            c.arguments_json for c in meant.tool_calls
        ]


@settings(deadline=None)
@given(talk=talks(DEMO_TEXT, CODE))
def test_the_demos_syntax(demo: ChatFormat, talk: Talk) -> None:
    check(demo, talk)


@settings(deadline=None)
@given(talk=talks(ANY_TEXT, ANY_TEXT))
def test_hermes_syntax(hermes: ChatFormat, folder: Path, talk: Talk) -> None:
    for message in talk:
        for part in message.content:
            part.text = hermes.neutralise(part.text)
    check(hermes, talk)
    whole = ChatTemplate(folder, read_settings(folder)).render(
        [plain_message(m) for m in talk], opening=False
    )
    assert hermes.decode(hermes.encode_demonstration(talk)[0]) == whole.removesuffix("\n")


PIECES = st.lists(st.sampled_from([*SPECIAL, "<|", "|>", "im_end", "<tool_call>", " ", "x"]))


@settings(deadline=None)
@given(pieces=PIECES)
def test_what_a_tool_prints_holds_no_special_token(hermes: ChatFormat, pieces: list[str]) -> None:
    ids = hermes._encode(hermes.neutralise("".join(pieces)))
    assert not set(ids.tolist()) & set(range(len(SPECIAL)))


@settings(deadline=None)
@given(text=ANY_TEXT)
def test_other_text_is_left_alone(hermes: ChatFormat, text: str) -> None:
    if not any(special in text for special in SPECIAL):
        assert hermes.neutralise(text) == text
