"""Chat formats without transformers: messages to token ids, sampled ids to a message.

Token-in, token-out: a prompt is rendered and tokenised once; after that only new environment text is tokenised, and what
was sampled is kept as it is. ``ChatFormat`` needs a folder in Hugging Face layout (tokenizer.json, and
tokenizer_config.json or chat_template.jinja) and only the ``tokenizers`` and ``jinja2`` packages.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rollstream.v1 import events_pb2

IntArray = npt.NDArray[np.int32]


class ChatFormat:
    """The chat format of one model folder.

    Attributes:
        stop_ids: ids that end an assistant message (eos_token and, if other, the template's end-of-turn token).
        pad_id: id for padding.
        vocab_size: number of ids.
    """

    def __init__(self, model_dir: Path) -> None:
        """Raises ``ConfigError`` when the folder holds no tokenizer or no chat template."""
        raise RuntimeError("contract only")

    def render_prompt(
        self, messages: Sequence[events_pb2.Message], tools: Sequence[events_pb2.ToolSpec]
    ) -> IntArray:
        """Ids of the conversation so far, up to and including the opening of the assistant's turn."""
        raise RuntimeError("contract only")

    def render_continuation(
        self, results: Sequence[events_pb2.Message], *, closed: bool
    ) -> IntArray:
        """Ids to append after a sampled assistant message: its closing (unless ``closed`` by a sampled stop id), the tool
        messages, and the opening of the next assistant turn."""
        raise RuntimeError("contract only")

    def parse_assistant(self, token_ids: IntArray, *, turn: int) -> events_pb2.Message:
        """The sampled ids as a message: text, and tool calls in the model's own syntax (``<tool>``, Hermes JSON).

        Tool call ids are ``call-<turn>-<k>``. Syntax that opens a call and does not close it is text.
        """
        raise RuntimeError("contract only")

    def encode_demonstration(
        self, messages: Sequence[events_pb2.Message], tools: Sequence[events_pb2.ToolSpec] = ()
    ) -> tuple[IntArray, npt.NDArray[np.bool_]]:
        """A whole conversation as ids, and the mask of what the assistant wrote, end-of-turn included.

        Token for token what a rollout of the same messages would hold.
        """
        raise RuntimeError("contract only")

    def decode(self, token_ids: IntArray) -> str:
        """Text with special tokens kept."""
        raise RuntimeError("contract only")
