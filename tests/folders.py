"""Policy folders for tests of chat formats: a byte-level tokenizer and chat templates of the kinds in use."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

# As Qwen's: a system prompt of its own when there is none, tools listed in it, tool results as the user's words.
CHATML = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0]['role'] == 'system' %}
        {{- messages[0]['content'] }}
    {%- else %}
        {{- 'You are helpful.' }}
    {%- endif %}
    {{- "\\n\\n# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}
            {{- '\\n' + message.content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- set tool_call = tool_call.function %}
            {{- '\\n<tool_call>\\n{"name": "' }}
            {{- tool_call.name }}
            {{- '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' }}
        {{- message.content }}
        {{- '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

# As SmolLM2's.
PLAIN = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# As Llama's: no line end after the turn, an indented listing, the date, loop controls, marked assistant text.
LLAMA = """\
{{- bos_token }}
{%- set date = strftime_now("%d %b %Y") if strftime_now is defined else "26 Jul 2024" %}
{{- "<|im_start|>system\\n\\nToday: " + date + "\\n" }}
{%- for t in tools or [] %}
    {{- t | tojson(indent=4) }}
    {{- "\\n\\n" }}
{%- endfor %}
{{- "<|im_end|>" }}
{%- for message in messages %}
    {%- if message.role == "system" %}{% continue %}{% endif %}
    {{- "<|im_start|>" + message.role + "\\n\\n" }}
    {%- if message.role == "assistant" %}
        {%- generation %}{{- message.content | trim }}{% endgeneration %}
    {%- else %}
        {{- message.content | trim }}
    {%- endif %}
    {{- "<|im_end|>" }}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|im_start|>assistant\\n\\n" }}{% endif %}
"""


def tokenizer_json(*, truncate: int = 0) -> str:
    """A byte-level tokenizer: any text is ids and back."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[AddedToken(text, special=True) for text in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([CHATML, "print the sum of all numbers and answer"], trainer)
    if truncate:
        tokenizer.enable_truncation(truncate)
        tokenizer.enable_padding(length=truncate)
    return str(tokenizer.to_str())


def policy_folder(
    folder: Path,
    template: object = CHATML,
    *,
    settings: Mapping[str, Any] | None = None,
    truncate: int = 0,
) -> Path:
    """A folder in Hugging Face layout without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer_json(truncate=truncate), "utf-8")
    values = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|endoftext|>",
        "eos_token": {"__type": "AddedToken", "content": "<|im_end|>", "special": True},
        "pad_token": "<|endoftext|>",
        "chat_template": template,
        **(settings or {}),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(values), "utf-8")
    return folder
