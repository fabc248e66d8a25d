"""Events as rows: one pure function per topic, from (event, origin) to rows of one or more tables.

A row is a tuple in the order of ``COLUMNS[table]``. Token arrays become numpy views; no per-token
loop.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from rollstream import codecs, ids, topics
from rollstream.codecs import text_of
from rollstream.errors import ContractError
from rollstream.v1 import events_pb2, policy_pb2

Row = tuple[Any, ...]
Rows = list[tuple[str, Row]]

# A number beyond it is a broken event: its ids alone would fill the memory.
_MAX_GROUP = 1 << 16
# What DateTime64 holds.
_FIRST_YEAR, _LAST_YEAR = 1900, 2261
_ORIGIN = ("_log", "_topic", "_partition", "_offset")

COLUMNS: dict[str, tuple[str, ...]] = {
    "tasks": (
        "run_id", "task_id", "group_id", "domain", "purpose", "tier", "suite", "group_size",
        "rollout_ids", "difficulty", "source", "source_index", "epoch", "prompt", "verifier",
        "occurred_at", *_ORIGIN,
    ),
    "trajectories": (
        "run_id", "rollout_id", "attempt", "task_id", "group_id", "sample_index", "domain",
        "purpose", "suite", "status", "reason", "error", "turns", "tool_calls", "tool_failures",
        "tokens", "sampled_tokens", "policy_version_min", "policy_version_max", "validity",
        "evidence", "temperature", "queue_s", "generate_s", "tool_s", "sandbox_wait_s", "verify_s",
        "started_at", "finished_at", "worker_id", "sandbox_id", "trace_id", *_ORIGIN,
    ),
    "turns": (
        "run_id", "rollout_id", "attempt", "turn", "text", "tool_names", "tool_arguments",
        "tool_statuses", "tool_outputs", "finish_reason", "sampled_tokens", "generate_s", "tool_s",
    ),
    "tokens": (
        "run_id", "rollout_id", "attempt", "sequence", "token_ids", "logprobs", "sampled_starts",
        "sampled_lengths", "versions", "version_starts", "version_lengths",
    ),
    "scores": (
        "run_id", "rollout_id", "attempt", "task_id", "group_id", "domain", "purpose", "suite",
        "raw", "normalised", "components", "weights", "normaliser", "normaliser_mean",
        "normaliser_std", "normaliser_count", "reward_spec_digest", "flags", "validity",
        "invalid_reason", "scored_at", *_ORIGIN,
    ),
    "groups": (
        "run_id", "group_id", "task_id", "domain", "group_size", "close_reason", "drop_reason",
        "advantage_estimator", "reward_mean", "reward_std", "closed_at", *_ORIGIN,
    ),
    "group_samples": (
        "run_id", "group_id", "rollout_id", "segment", "sample_index", "reward", "advantage",
        "policy_version_min", "policy_version_max", "drop_reason",
    ),
    "training_steps": (
        "run_id", "event_id", "step", "stage", "policy_version", "samples", "tokens", "metrics",
        "trained_at", *_ORIGIN,
    ),
    "training_samples": (
        "run_id", "rollout_id", "segment", "group_id", "event_id", "step", "staleness",
        "advantage", "reward", "tokens", "ratio_mean", "ratio_max", "clip_fraction", "loss",
        "drop_reason",
    ),
    "policy_versions": (
        "run_id", "policy", "version", "step", "stage", "uri", "digest", "size_bytes", "baseline",
        "final", "published_at", *_ORIGIN,
    ),
    "evaluations": (
        "run_id", "suite", "policy_version", "task_id", "domain", "rollout_id", "score",
        "validity", "invalid_reason", "tasks", "baseline", "final", "evaluated_at", *_ORIGIN,
    ),
    "curriculum": (
        "run_id", "domain", "sampling_weight", "loss_weight", "stage", "statistics",
        "occurred_at", *_ORIGIN,
    ),
    "dead_letters": (
        "run_id", "event_id", "service", "origin_topic", "origin_partition", "origin_offset",
        "error_code", "error", "hint", "task_id", "rollout_id", "samples", "key", "value",
        "occurred_at", *_ORIGIN,
    ),
    "ingested": ("_log", "_topic", "_partition", "first", "last", "records", "broken"),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a record came from; ``trace_id`` from its headers, or empty."""

    log: str
    topic: str
    partition: int
    offset: int
    trace_id: str = ""

    @property
    def columns(self) -> Row:
        return (self.log, self.topic, self.partition, self.offset)


def rows_of(event: Message, origin: Origin) -> Rows:
    """The rows of one event.

    Raises:
        ContractError: a value that no column can hold.
    """
    return _CONVERTERS[origin.topic](event, origin)


def _task(task: events_pb2.Task, origin: Origin) -> Rows:
    if task.group_size > _MAX_GROUP:
        raise ContractError(
            f"{origin.topic}: {task.task_id} asks for {task.group_size} rollouts",
            hint=f"a group has at most {_MAX_GROUP}",
        )
    rollouts = [ids.rollout_id(task.task_id, index) for index in range(task.group_size)]
    prompt = "\n\n".join(text_of(message) for message in task.prompt)
    row = (
        task.header.run_id, task.task_id, task.group_id, task.domain, _purpose(task.purpose),
        _name(events_pb2.Tier, task.tier, "TIER_"), task.suite, task.group_size, rollouts,
        task.difficulty, task.source, task.index, task.epoch, prompt, task.verifier.name,
        _time(task.header.occurred_at), *origin.columns,
    )  # fmt: skip
    return [("tasks", row)]


def _trajectory(t: events_pb2.Trajectory, origin: Origin) -> Rows:
    results = [result for turn in t.turns for result in turn.tool_results]
    good = sum(result.status == events_pb2.TOOL_STATUS_OK for result in results)
    timings = t.timings
    status = _name(events_pb2.OutcomeStatus, t.outcome.status, "OUTCOME_STATUS_")
    row = (
        t.header.run_id, t.rollout_id, t.attempt, t.task_id, t.group_id, t.sample_index, t.domain,
        _purpose(t.purpose), t.suite, status,
        t.outcome.reason, t.outcome.error, len(t.turns), len(results), len(results) - good,
        sum(len(s.token_ids) // 4 for s in t.sequences), t.sampled_tokens, t.policy_version_min,
        t.policy_version_max, _validity(t.evidence.validity),
        {item.name: item.value for item in t.evidence.items}, t.sampling.temperature,
        timings.queue_s, timings.generate_s, timings.tool_s, timings.sandbox_wait_s,
        timings.verify_s, _time(timings.started_at), _time(timings.finished_at), t.worker_id,
        t.sandbox_id, origin.trace_id, *origin.columns,
    )  # fmt: skip
    turns = [("turns", _turn(t, turn)) for turn in t.turns]
    tokens = [("tokens", _tokens(t, number, s)) for number, s in enumerate(t.sequences)]
    # The main table last: its row says that the others are there.
    return [*turns, *tokens, ("trajectories", row)]


def _turn(t: events_pb2.Trajectory, turn: events_pb2.Turn) -> Row:
    calls = turn.assistant.tool_calls
    return (
        t.header.run_id, t.rollout_id, t.attempt, turn.index, text_of(turn.assistant),
        [call.name for call in calls], [call.arguments_json for call in calls],
        [_name(events_pb2.ToolStatus, r.status, "TOOL_STATUS_") for r in turn.tool_results],
        [r.content for r in turn.tool_results],
        _name(events_pb2.FinishReason, turn.finish_reason, "FINISH_REASON_"), turn.sampled.length,
        turn.generate_s, turn.tool_s,
    )  # fmt: skip


def _tokens(t: events_pb2.Trajectory, number: int, s: events_pb2.TokenSequence) -> Row:
    return (
        t.header.run_id, t.rollout_id, t.attempt, number, codecs.token_array(s),
        codecs.logprob_array(s),
        np.array([span.start for span in s.sampled], dtype=np.uint32),
        np.array([span.length for span in s.sampled], dtype=np.uint32),
        np.array([span.policy_version for span in s.versions], dtype=np.uint64),
        np.array([span.start for span in s.versions], dtype=np.uint32),
        np.array([span.length for span in s.versions], dtype=np.uint32),
    )  # fmt: skip


def _scored(s: events_pb2.ScoredTrajectory, origin: Origin) -> Rows:
    row = (
        s.header.run_id, s.rollout_id, s.attempt, s.task_id, s.group_id, s.domain,
        _purpose(s.purpose), s.suite, s.raw, s.normalised,
        {c.name: c.value for c in s.components}, {c.name: c.weight for c in s.components},
        s.normaliser.kind, s.normaliser.mean, s.normaliser.std, s.normaliser.count,
        s.reward_spec_digest, list(s.flags), _validity(s.validity), s.invalid_reason,
        _time(s.header.occurred_at), *origin.columns,
    )  # fmt: skip
    return [("scores", row)]


def _group(g: events_pb2.TrainingGroup, origin: Origin) -> Rows:
    samples: Rows = [
        (
            "group_samples",
            (
                g.header.run_id, g.group_id, s.rollout_id, s.segment, s.sample_index, s.reward,
                s.advantage, s.policy_version_min, s.policy_version_max,
                s.drop_reason or g.drop_reason,
            ),
        )
        for s in g.samples
    ]  # fmt: skip
    row = (
        g.header.run_id, g.group_id, g.task_id, g.domain, g.group_size,
        _name(events_pb2.CloseReason, g.close_reason, "CLOSE_REASON_"), g.drop_reason,
        g.advantage_estimator, g.reward_mean, g.reward_std, _time(g.header.occurred_at),
        *origin.columns,
    )  # fmt: skip
    return [*samples, ("groups", row)]


def _step(e: events_pb2.TrainingStep, origin: Origin) -> Rows:
    uses: Rows = [
        (
            "training_samples",
            (
                e.header.run_id, u.rollout_id, u.segment, u.group_id, e.header.event_id, e.step,
                u.staleness, u.advantage, u.reward, u.tokens, u.ratio_mean, u.ratio_max,
                u.clip_fraction, u.loss, u.drop_reason,
            ),
        )
        for u in e.samples
    ]  # fmt: skip
    row = (
        e.header.run_id, e.header.event_id, e.step, e.stage, e.policy_version, len(e.samples),
        e.tokens, dict(e.metrics), _time(e.header.occurred_at), *origin.columns,
    )  # fmt: skip
    return [*uses, ("training_steps", row)]


def _version(v: policy_pb2.PolicyVersion, origin: Origin) -> Rows:
    row = (
        v.header.run_id, v.policy, v.version, v.step, v.stage, v.uri, v.digest,
        sum(f.size_bytes for f in v.files), v.baseline, v.final, _time(v.header.occurred_at),
        *origin.columns,
    )  # fmt: skip
    return [("policy_versions", row)]


def _evaluation(e: events_pb2.EvaluationResult, origin: Origin) -> Rows:
    row = (
        e.header.run_id, e.suite, e.policy_version, e.task_id, e.domain, e.rollout_id, e.score,
        _validity(e.validity), e.invalid_reason, e.tasks, e.baseline, e.final,
        _time(e.header.occurred_at), *origin.columns,
    )  # fmt: skip
    return [("evaluations", row)]


def _curriculum(c: events_pb2.CurriculumState, origin: Origin) -> Rows:
    row = (
        c.header.run_id, c.domain, c.sampling_weight, c.loss_weight, c.stage, dict(c.statistics),
        _time(c.header.occurred_at), *origin.columns,
    )  # fmt: skip
    return [("curriculum", row)]


def _dead_letter(d: events_pb2.DeadLetter, origin: Origin) -> Rows:
    row = (
        d.header.run_id, d.header.event_id, d.service, d.topic, d.partition, d.offset,
        d.error_code, d.error, d.hint, d.task_id, d.rollout_id, d.samples, d.key, d.value,
        _time(d.header.occurred_at), *origin.columns,
    )  # fmt: skip
    return [("dead_letters", row)]


_CONVERTERS: dict[str, Callable[[Any, Origin], Rows]] = {
    topics.TASKS_SHORT.name: _task,
    topics.TASKS_STANDARD.name: _task,
    topics.TASKS_LONG.name: _task,
    topics.TRAJECTORIES.name: _trajectory,
    topics.REWARDS.name: _scored,
    topics.REPLAY.name: _group,
    topics.TRAINING_STEPS.name: _step,
    topics.POLICY_VERSIONS.name: _version,
    topics.EVALUATIONS.name: _evaluation,
    topics.CURRICULUM.name: _curriculum,
    topics.DEAD_LETTERS.name: _dead_letter,
}


def _name(enum: Any, value: int, prefix: str) -> str:
    """An enum value as a lower-case word; a value that this program does not know as its number."""
    known = enum.DESCRIPTOR.values_by_number.get(value)
    return known.name.removeprefix(prefix).lower() if known else str(value)


def _purpose(value: int) -> str:
    return _name(events_pb2.Purpose, value, "PURPOSE_")


def _validity(value: int) -> str:
    return _name(events_pb2.Validity, value, "VALIDITY_")


def _time(stamp: Timestamp) -> datetime:
    try:
        time = stamp.ToDatetime(tzinfo=UTC)
    except (ValueError, OverflowError) as error:
        raise ContractError(
            f"{stamp.seconds} s and {stamp.nanos} ns are no time: {error}"
        ) from error
    if not _FIRST_YEAR <= time.year <= _LAST_YEAR:
        raise ContractError(f"{time.isoformat()} is out of range: {_FIRST_YEAR} to {_LAST_YEAR}")
    return time
