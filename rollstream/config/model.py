"""The one configuration that drives every service: typed, closed, and the same embedded, in compose
and on Kubernetes.

Each section belongs to one package and is read by it alone; ``run``, ``bus``, ``blob``, ``store``,
``policy``, ``domains``, ``telemetry`` and ``log`` are common. Sizes are in bytes, times in seconds,
as the names say.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]*$", max_length=120)]
Port = Annotated[int, Field(ge=0, le=65535)]
Positive = Annotated[int, Field(gt=0)]


class Section(BaseModel):
    """Base of all sections: frozen, and an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class RunConfig(Section):
    """Which run this is.

    ``id`` is part of every deterministic id; ``dir`` holds what the run leaves behind.
    """

    id: Name = "run"
    seed: int = 0
    dir: Path = Path("runs/run")


class SecurityConfig(Section):
    """Kafka client security, passed through to aiokafka and Faust."""

    protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = "PLAINTEXT"
    sasl_mechanism: Literal["", "PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] = ""
    username: str = ""
    password: str = Field(default="", repr=False)
    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None


class BusConfig(Section):
    """Kafka.

    ``mode = "embedded"`` lets the supervisor start a broker; ``external`` uses
    ``bootstrap_servers``.
    """

    mode: Literal["embedded", "external"] = "embedded"
    # Embedded: filled in by the supervisor when empty.
    bootstrap_servers: str = ""
    # Embedded: the first broker's port, the others take the next ones; 0 takes free ones.
    port: Port = 0
    # Embedded: one, or three that replicate each other (with replication = 3).
    brokers: Literal[1, 3] = 1
    security: SecurityConfig = SecurityConfig()
    topic_prefix: str = ""
    partitions: Positive = 4
    replication: Positive = 1
    # Replicas that must have a record before it is acknowledged; 0: all but one.
    min_insync_replicas: int = Field(default=0, ge=0)
    retention_hours: int = Field(default=24 * 7, gt=0)
    compression: Literal["none", "gzip", "snappy", "lz4", "zstd"] = "zstd"
    linger_ms: int = Field(default=5, ge=0, le=10_000)
    batch_bytes: Positive = 1 << 20
    # Largest value accepted by producer and broker.
    max_message_bytes: Positive = 32 << 20
    # A larger value goes to the blob store and the event carries its reference.
    max_inline_bytes: Positive = 4 << 20
    # Read ahead per partition; a larger value still arrives. 4 MiB reads a fifth faster than 32 MiB
    # (measured: what is read stays in the CPU's cache) and bounds a consumer's memory.
    fetch_bytes: Positive = 4 << 20
    session_timeout_s: float = Field(default=10.0, ge=6.0)
    request_timeout_s: float = Field(default=30.0, gt=0)
    # How long a send or a fetch is retried before it is an InfraError.
    retry_budget_s: float = Field(default=120.0, gt=0)
    # Embedded broker's Java heap.
    heap_bytes: Positive = 256 << 20

    @property
    def in_sync(self) -> int:
        """``min.insync.replicas`` of every topic."""
        return self.min_insync_replicas or max(1, self.replication - 1)

    @model_validator(mode="after")
    def _replicas(self) -> BusConfig:
        if self.mode == "embedded" and self.replication > self.brokers:
            raise ValueError(
                f"replication {self.replication} needs as many brokers, and brokers is"
                f" {self.brokers}"
            )
        if self.in_sync > self.replication:
            raise ValueError(
                f"min_insync_replicas {self.min_insync_replicas} is above replication"
                f" {self.replication}: nothing could be written"
            )
        return self


class BlobConfig(Section):
    """Content-addressed store for large values and weights: any fsspec URI; empty means
    ``<run.dir>/blobs``.
    """

    uri: str = ""


class StoreConfig(Section):
    """ClickHouse.

    ``embedded``: the store service serves chDB at host:port; ``external``: an ordinary server.
    """

    mode: Literal["embedded", "external"] = "embedded"
    host: str = "127.0.0.1"
    # Embedded: 0 takes a free port.
    port: Port = 0
    secure: bool = False
    database: Name = "rollstream"
    username: str = "default"
    password: str = Field(default="", repr=False)
    # Embedded: chDB's folder; empty means ``<run.dir>/store``.
    path: str = ""
    request_timeout_s: float = Field(default=60.0, gt=0)
    # Sink: rows wait at most this long, and a chunk closes at this many records or bytes.
    flush_interval_s: float = Field(default=1.0, gt=0)
    chunk_records: Positive = 500
    chunk_bytes: Positive = 32 << 20


class TelemetryConfig(Section):
    """OpenTelemetry. Empty endpoint: spans are made and propagated, and exported nowhere."""

    otlp_endpoint: str = ""
    # Spans are exported for this share of the traces.
    sample_ratio: float = Field(default=1.0, ge=0, le=1)


class LogConfig(Section):
    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["json", "console"] = "json"


class ServiceConfig(Section):
    """Common to all services: where health is served and how long a drain may take."""

    host: str = "127.0.0.1"
    # 0 takes a free port; the port is written to <run.dir>/services/<name>.json.
    health_port: Port = 0
    drain_s: float = Field(default=20.0, gt=0)
    # With work waiting and nothing done for so long, the service ends and is started again.
    stall_s: float = Field(default=180.0, gt=0)


class ModelConfig(Section):
    """The policy's starting point: a folder in Hugging Face layout, or a fresh tiny model for the
    demo.

    ``path`` wins. Otherwise a random Qwen3 of the given size is made with the tokenizer of
    ``tokenizer_domain``.
    """

    path: str = ""
    tokenizer_domain: str = ""
    hidden_size: Positive = 128
    intermediate_size: Positive = 384
    layers: Positive = 3
    heads: Positive = 4
    kv_heads: Positive = 4
    head_dim: Positive = 32
    vocab_size: Positive = 64
    max_positions: Positive = 512


class PolicyConfig(Section):
    name: Name = "policy"
    model: ModelConfig = ModelConfig()
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    # Longest sequence, prompt included, in tokens.
    max_length: Positive = 512


class RewardComponentConfig(Section):
    """One component: ``evidence`` names the evidence item that is its value, ``weight`` its share
    of the sum.
    """

    name: Name
    evidence: str
    weight: float = 1.0


class GateConfig(Section):
    """When the evidence item is below ``at_least``, the reward is ``value`` whatever the components
    say.
    """

    evidence: str
    at_least: float = 1.0
    value: float = 0.0


class RewardConfig(Section):
    """How a domain's evidence becomes a reward (DESIGN section 6).

    Default: the evidence item "correct".
    """

    components: tuple[RewardComponentConfig, ...] = (
        RewardComponentConfig(name="correct", evidence="correct"),
    )
    gates: tuple[GateConfig, ...] = ()
    clip_min: float = -10.0
    clip_max: float = 10.0
    normaliser: Literal["none", "running"] = "running"
    # Weight of the past in the running statistics, per sample.
    decay: float = Field(default=0.999, gt=0, lt=1)
    loss_weight: float = Field(default=1.0, ge=0)

    @model_validator(mode="after")
    def _weights(self) -> RewardConfig:
        if not self.components or not any(c.weight for c in self.components):
            raise ValueError("the weights of the reward components sum to nothing")
        if self.clip_min >= self.clip_max:
            raise ValueError(f"clip_min {self.clip_min} is not below clip_max {self.clip_max}")
        return self


class BudgetConfig(Section):
    max_turns: Positive = 8
    max_tokens: Positive = 4096
    max_tokens_per_turn: Positive = 1024
    wall_s: float = Field(default=600.0, gt=0)
    tool_s: float = Field(default=60.0, gt=0)


class DomainConfig(Section):
    """One domain of the run: which environment, how often, with which reward.

    ``environment`` is the name of a registered environment ("demo-arithmetic", "jsonl",
    "reasoning-gym", or a plug-in's); ``options`` are its own, checked by it.
    """

    name: Name
    environment: str
    options: dict[str, Any] = Field(default_factory=dict)
    weight: float = Field(default=1.0, ge=0)
    tier: Literal["short", "standard", "long"] = "short"
    group_size: Positive = 8
    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    budget: BudgetConfig = BudgetConfig()
    reward: RewardConfig = RewardConfig()


class ProducersConfig(ServiceConfig):
    """Admission is paced: tasks in the pipeline never exceed what the staleness bound lets the
    trainer use.
    """

    # 0: until the policy is final.
    max_tasks: int = Field(default=0, ge=0)
    # Hold training tasks back until the baseline evaluation is in.
    wait_for_baseline: bool = False
    # Hard bound on groups produced and not yet closed, whatever the trainer does.
    max_groups_in_flight: Positive = 256


class EngineConfig(Section):
    """``auto``: vLLM when it can be imported, else light."""

    kind: Literal["auto", "vllm", "light", "scripted"] = "auto"
    max_sequences: Positive = 64
    max_batched_tokens: Positive = 2048
    # On a CPU: memory for the key-value cache.
    kv_cache_bytes: Positive = 1 << 30
    block_size: Positive = 32
    # vLLM: passed on to EngineArgs as they are.
    extra: dict[str, Any] = Field(default_factory=dict)
    # scripted: "module:function" of the script.
    script: str = ""


class RolloutsConfig(ServiceConfig):
    engine: EngineConfig = EngineConfig()
    # Rollouts in flight on one worker.
    max_rollouts: Positive = 128
    # Tasks fetched and not yet finished on one worker.
    max_tasks: Positive = 64
    tiers: tuple[Literal["short", "standard", "long"], ...] = ("short", "standard", "long")
    # Tries of one rollout when the sandbox is lost or the engine fails.
    max_attempts: Positive = 3
    # A task that so many workers may have had and not finished is done alone; when two workers have
    # died of it alone it is a dead letter.
    max_deliveries: Positive = 2
    sandbox_targets: tuple[str, ...] = ()
    # Tool output beyond this many characters is cut (and counted).
    max_tool_chars: Positive = 8192


class SandboxLimits(Section):
    memory_bytes: Positive = 512 << 20
    pids: Positive = 64
    disk_bytes: Positive = 64 << 20
    cpus: float = Field(default=1.0, gt=0)
    wall_s: float = Field(default=30.0, gt=0)
    output_bytes: Positive = 1 << 20


class SandboxesConfig(ServiceConfig):
    """The executor.

    ``native`` and ``bubblewrap`` isolate alike, native at a quarter of the cost; ``process``
    isolates nothing and needs ``unsafe = true``.
    """

    backend: Literal["native", "bubblewrap", "process"] = "native"
    unsafe: bool = False
    # gRPC; 0 takes a free port.
    port: Port = 0
    max_sessions: Positive = 256
    # The oldest is dropped when there is one more.
    max_snapshots: Positive = 1024
    # Sessions kept ready, by toolchain.
    pool: dict[str, int] = Field(default_factory=lambda: {"python": 16})
    lease_s: float = Field(default=30.0, gt=0)
    limits: SandboxLimits = SandboxLimits()


class ProcessorsConfig(ServiceConfig):
    # A group that is not complete closes this long after its first trajectory.
    group_deadline_s: float = Field(default=300.0, gt=0)
    # On deadline: fewer valid samples than this drop the group ("too_few_valid").
    group_min_samples: Positive = 2
    advantage: Literal["group_std", "group_mean", "leave_one_out"] = "group_std"
    # At most so many records are worked through together, and so many bytes held.
    batch_records: Positive = 512
    batch_bytes: Positive = 64 << 20
    commit_interval_s: float = Field(default=0.5, gt=0)
    # Closed groups that are remembered per partition, so that what comes late changes nothing.
    closed_groups: Positive = 100_000
    # RocksDB under run.dir, or memory with recovery from the changelog.
    table_store: Literal["memory", "rocksdb"] = "memory"


class OptimiserConfig(Section):
    lr: float = Field(default=2e-4, gt=0)
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    grad_clip: float = Field(default=1.0, gt=0)
    warmup_steps: int = Field(default=0, ge=0)


class SftStage(Section):
    """Warm start on the demonstrations of a domain."""

    kind: Literal["sft"] = "sft"
    name: Name = "sft"
    domain: str
    steps: Positive = 300
    batch_size: Positive = 64
    optimiser: OptimiserConfig = OptimiserConfig(
        lr=2e-3, beta2=0.98, weight_decay=0.01, warmup_steps=20
    )
    # Learning rate at the end, as a share of lr (linear decay).
    final_lr_share: float = Field(default=0.1, ge=0, le=1)


class RlStage(Section):
    """Off-policy RL from the replay topic."""

    kind: Literal["rl"] = "rl"
    name: Name = "rl"
    steps: Positive = 40
    groups_per_step: Positive = 16
    objective: Literal["grpo"] = "grpo"
    # Truncation of the importance weight exp(logp - logp_behaviour).
    tis_clip: float = Field(default=2.0, gt=0)
    kl_coefficient: float = Field(default=0.0, ge=0)
    # Trainer version minus the oldest version that sampled a trajectory; beyond it the sample is
    # dropped.
    max_staleness: int = Field(default=1, ge=0)
    optimiser: OptimiserConfig = OptimiserConfig()


Stage = Annotated[SftStage | RlStage, Field(discriminator="kind")]


class TrainerConfig(ServiceConfig):
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: Positive = 1
    # Sequences are packed into rows of so many tokens (1: a row for each; the quickest for short
    # ones on a CPU, which gains nothing from long rows) ...
    row_tokens: Positive = 256
    # ... and so many tokens are on the device at once; their gradients add up.
    pack_tokens: Positive = 8192
    # A version is published, and a checkpoint is taken, each so many optimiser steps.
    publish_every: Positive = 1
    keep_checkpoints: Positive = 3
    # Group ids already trained on that are remembered, to refuse repeats.
    trained_window: Positive = 100_000
    stages: tuple[Stage, ...] = ()


class EvaluationConfig(ServiceConfig):
    """Held-out tasks, greedy, through the same pipeline; the baseline and the final version are
    always evaluated.
    """

    suite: Name = "held-out"
    domains: tuple[str, ...] = ()
    tasks: Positive = 128
    # Also every so many versions; 0 = only baseline and final.
    every_versions: int = Field(default=0, ge=0)
    timeout_s: float = Field(default=600.0, gt=0)


class SupervisorConfig(Section):
    """The local supervisor: which services it runs and how it restarts them."""

    services: tuple[str, ...] = ()
    max_restarts: int = Field(default=5, ge=0)
    backoff_s: float = Field(default=0.5, gt=0)
    ready_timeout_s: float = Field(default=120.0, gt=0)
    # The run as a whole; 0 = no limit.
    timeout_s: float = Field(default=0.0, ge=0)


class Config(Section):
    """The whole configuration of a run."""

    run: RunConfig = RunConfig()
    bus: BusConfig = BusConfig()
    blob: BlobConfig = BlobConfig()
    store: StoreConfig = StoreConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    log: LogConfig = LogConfig()
    policy: PolicyConfig = PolicyConfig()
    domains: tuple[DomainConfig, ...] = ()
    producers: ProducersConfig = ProducersConfig()
    rollouts: RolloutsConfig = RolloutsConfig()
    sandboxes: SandboxesConfig = SandboxesConfig()
    sink: ServiceConfig = ServiceConfig()
    processors: ProcessorsConfig = ProcessorsConfig()
    trainer: TrainerConfig = TrainerConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    supervisor: SupervisorConfig = SupervisorConfig()

    @model_validator(mode="after")
    def _domains(self) -> Config:
        names = [d.name for d in self.domains]
        if len(set(names)) != len(names):
            raise ValueError(f"two domains have the same name: {sorted(names)}")
        for stage in self.trainer.stages:
            if isinstance(stage, SftStage) and stage.domain not in names:
                raise ValueError(
                    f"stage {stage.name!r} warms up on unknown domain {stage.domain!r};"
                    f" known: {names}"
                )
        unknown = set(self.evaluation.domains) - set(names)
        if unknown:
            raise ValueError(f"evaluation names unknown domains {sorted(unknown)}; known: {names}")
        return self

    def domain(self, name: str) -> DomainConfig:
        """The domain called ``name``; ``KeyError`` when there is none."""
        for domain in self.domains:
            if domain.name == name:
                return domain
        raise KeyError(name)

    @property
    def blob_uri(self) -> str:
        return self.blob.uri or str(self.run.dir / "blobs")

    @property
    def rl(self) -> RlStage | None:
        """The last RL stage, which bounds staleness and paces the producers."""
        stages = [s for s in self.trainer.stages if isinstance(s, RlStage)]
        return stages[-1] if stages else None
