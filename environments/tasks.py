"""From an environment's task to the ``Task`` event: shared by producers and evaluation."""

from __future__ import annotations

import json
from dataclasses import dataclass

from environments.base import Environment, TaskSpec
from rollstream import codecs, ids
from rollstream.config.model import DomainConfig
from rollstream.topics import TASKS, Topic
from rollstream.v1 import events_pb2

_TIERS = {
    "short": events_pb2.TIER_SHORT,
    "standard": events_pb2.TIER_STANDARD,
    "long": events_pb2.TIER_LONG,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOrigin:
    """Where a task came from; with the run it determines every id below it."""

    run_id: str
    source: str
    index: int
    epoch: int = 0
    seed: int = 0


def topic_of(domain: DomainConfig) -> Topic:
    """The topic of the domain's tier."""
    return TASKS[_TIERS[domain.tier]]


def training_task(
    environment: Environment, domain: DomainConfig, spec: TaskSpec, origin: TaskOrigin
) -> events_pb2.Task:
    """A task to sample ``domain.group_size`` rollouts of, for training."""
    task = _task(environment, domain, spec, origin)
    task.purpose = events_pb2.PURPOSE_TRAIN
    task.group_size = domain.group_size
    task.sampling.CopyFrom(
        events_pb2.SamplingParams(temperature=domain.temperature, top_p=domain.top_p)
    )
    return task


def evaluation_task(
    environment: Environment,
    domain: DomainConfig,
    spec: TaskSpec,
    origin: TaskOrigin,
    *,
    suite: str,
    min_policy_version: int,
) -> events_pb2.Task:
    """A held-out task: one greedy rollout, at ``min_policy_version`` or later, before others."""
    task = _task(environment, domain, spec, origin)
    task.purpose = events_pb2.PURPOSE_EVAL
    task.group_size = 1
    task.priority = 1
    task.suite = suite
    task.min_policy_version = min_policy_version
    task.sampling.CopyFrom(events_pb2.SamplingParams(temperature=0.0, top_p=1.0))
    return task


def _task(
    environment: Environment, domain: DomainConfig, spec: TaskSpec, origin: TaskOrigin
) -> events_pb2.Task:
    task_id = ids.task_id(origin.run_id, origin.source, origin.index, origin.epoch)
    budget = domain.budget
    return events_pb2.Task(
        header=codecs.header(origin.run_id, ids.event_id("Task", task_id)),
        task_id=task_id,
        group_id=ids.group_id(task_id),
        domain=domain.name,
        prompt=spec.prompt,
        tools=environment.tools,
        sandbox=events_pb2.SandboxSpec(
            toolchain=environment.toolchain, files=dict(spec.sandbox_files)
        ),
        verifier=events_pb2.VerifierSpec(
            name=domain.environment, params_json=json.dumps(dict(spec.verifier))
        ),
        budget=events_pb2.Budget(
            max_turns=budget.max_turns,
            max_tokens=budget.max_tokens,
            max_tokens_per_turn=budget.max_tokens_per_turn,
            wall_s=budget.wall_s,
            tool_s=budget.tool_s,
        ),
        tier=_TIERS[domain.tier],
        seed=origin.seed,
        difficulty=spec.difficulty,
        source=origin.source,
        index=origin.index,
        epoch=origin.epoch,
    )
