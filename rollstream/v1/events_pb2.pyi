import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_SYSTEM: _ClassVar[Role]
    ROLE_USER: _ClassVar[Role]
    ROLE_ASSISTANT: _ClassVar[Role]
    ROLE_TOOL: _ClassVar[Role]

class Tier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TIER_UNSPECIFIED: _ClassVar[Tier]
    TIER_SHORT: _ClassVar[Tier]
    TIER_STANDARD: _ClassVar[Tier]
    TIER_LONG: _ClassVar[Tier]

class Purpose(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PURPOSE_UNSPECIFIED: _ClassVar[Purpose]
    PURPOSE_TRAIN: _ClassVar[Purpose]
    PURPOSE_EVAL: _ClassVar[Purpose]
    PURPOSE_ADMISSION: _ClassVar[Purpose]

class ToolStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TOOL_STATUS_UNSPECIFIED: _ClassVar[ToolStatus]
    TOOL_STATUS_OK: _ClassVar[ToolStatus]
    TOOL_STATUS_FAILED: _ClassVar[ToolStatus]
    TOOL_STATUS_TIMEOUT: _ClassVar[ToolStatus]
    TOOL_STATUS_INVALID: _ClassVar[ToolStatus]
    TOOL_STATUS_INFRA: _ClassVar[ToolStatus]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_ABORT: _ClassVar[FinishReason]

class Validity(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    VALIDITY_UNSPECIFIED: _ClassVar[Validity]
    VALIDITY_VALID: _ClassVar[Validity]
    VALIDITY_INVALID: _ClassVar[Validity]

class OutcomeStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OUTCOME_STATUS_UNSPECIFIED: _ClassVar[OutcomeStatus]
    OUTCOME_STATUS_COMPLETED: _ClassVar[OutcomeStatus]
    OUTCOME_STATUS_TRUNCATED: _ClassVar[OutcomeStatus]
    OUTCOME_STATUS_FAILED: _ClassVar[OutcomeStatus]

class CloseReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CLOSE_REASON_UNSPECIFIED: _ClassVar[CloseReason]
    CLOSE_REASON_COMPLETE: _ClassVar[CloseReason]
    CLOSE_REASON_DEADLINE: _ClassVar[CloseReason]
    CLOSE_REASON_MIN_COUNT: _ClassVar[CloseReason]
ROLE_UNSPECIFIED: Role
ROLE_SYSTEM: Role
ROLE_USER: Role
ROLE_ASSISTANT: Role
ROLE_TOOL: Role
TIER_UNSPECIFIED: Tier
TIER_SHORT: Tier
TIER_STANDARD: Tier
TIER_LONG: Tier
PURPOSE_UNSPECIFIED: Purpose
PURPOSE_TRAIN: Purpose
PURPOSE_EVAL: Purpose
PURPOSE_ADMISSION: Purpose
TOOL_STATUS_UNSPECIFIED: ToolStatus
TOOL_STATUS_OK: ToolStatus
TOOL_STATUS_FAILED: ToolStatus
TOOL_STATUS_TIMEOUT: ToolStatus
TOOL_STATUS_INVALID: ToolStatus
TOOL_STATUS_INFRA: ToolStatus
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_ABORT: FinishReason
VALIDITY_UNSPECIFIED: Validity
VALIDITY_VALID: Validity
VALIDITY_INVALID: Validity
OUTCOME_STATUS_UNSPECIFIED: OutcomeStatus
OUTCOME_STATUS_COMPLETED: OutcomeStatus
OUTCOME_STATUS_TRUNCATED: OutcomeStatus
OUTCOME_STATUS_FAILED: OutcomeStatus
CLOSE_REASON_UNSPECIFIED: CloseReason
CLOSE_REASON_COMPLETE: CloseReason
CLOSE_REASON_DEADLINE: CloseReason
CLOSE_REASON_MIN_COUNT: CloseReason

class Header(_message.Message):
    __slots__ = ("event_id", "schema_version", "run_id", "occurred_at")
    EVENT_ID_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_VERSION_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    OCCURRED_AT_FIELD_NUMBER: _ClassVar[int]
    event_id: str
    schema_version: int
    run_id: str
    occurred_at: _timestamp_pb2.Timestamp
    def __init__(self, event_id: _Optional[str] = ..., schema_version: _Optional[int] = ..., run_id: _Optional[str] = ..., occurred_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class BlobRef(_message.Message):
    __slots__ = ("sha256", "size_bytes", "media_type")
    SHA256_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEDIA_TYPE_FIELD_NUMBER: _ClassVar[int]
    sha256: str
    size_bytes: int
    media_type: str
    def __init__(self, sha256: _Optional[str] = ..., size_bytes: _Optional[int] = ..., media_type: _Optional[str] = ...) -> None: ...

class ContentPart(_message.Message):
    __slots__ = ("text", "image")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    text: str
    image: BlobRef
    def __init__(self, text: _Optional[str] = ..., image: _Optional[_Union[BlobRef, _Mapping]] = ...) -> None: ...

class ToolCall(_message.Message):
    __slots__ = ("id", "name", "arguments_json")
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_JSON_FIELD_NUMBER: _ClassVar[int]
    id: str
    name: str
    arguments_json: str
    def __init__(self, id: _Optional[str] = ..., name: _Optional[str] = ..., arguments_json: _Optional[str] = ...) -> None: ...

class Message(_message.Message):
    __slots__ = ("role", "content", "tool_calls", "tool_call_id", "name")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    role: Role
    content: _containers.RepeatedCompositeFieldContainer[ContentPart]
    tool_calls: _containers.RepeatedCompositeFieldContainer[ToolCall]
    tool_call_id: str
    name: str
    def __init__(self, role: _Optional[_Union[Role, str]] = ..., content: _Optional[_Iterable[_Union[ContentPart, _Mapping]]] = ..., tool_calls: _Optional[_Iterable[_Union[ToolCall, _Mapping]]] = ..., tool_call_id: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class ToolSpec(_message.Message):
    __slots__ = ("name", "description", "parameters_json")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_JSON_FIELD_NUMBER: _ClassVar[int]
    name: str
    description: str
    parameters_json: str
    def __init__(self, name: _Optional[str] = ..., description: _Optional[str] = ..., parameters_json: _Optional[str] = ...) -> None: ...

class SandboxSpec(_message.Message):
    __slots__ = ("toolchain", "memory_bytes", "pids", "disk_bytes", "cpus", "files")
    class FilesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: bytes
        def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...
    TOOLCHAIN_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    PIDS_FIELD_NUMBER: _ClassVar[int]
    DISK_BYTES_FIELD_NUMBER: _ClassVar[int]
    CPUS_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    toolchain: str
    memory_bytes: int
    pids: int
    disk_bytes: int
    cpus: float
    files: _containers.ScalarMap[str, bytes]
    def __init__(self, toolchain: _Optional[str] = ..., memory_bytes: _Optional[int] = ..., pids: _Optional[int] = ..., disk_bytes: _Optional[int] = ..., cpus: _Optional[float] = ..., files: _Optional[_Mapping[str, bytes]] = ...) -> None: ...

class VerifierSpec(_message.Message):
    __slots__ = ("name", "params_json")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PARAMS_JSON_FIELD_NUMBER: _ClassVar[int]
    name: str
    params_json: str
    def __init__(self, name: _Optional[str] = ..., params_json: _Optional[str] = ...) -> None: ...

class Assertion(_message.Message):
    __slots__ = ("name", "kind", "params_json", "gate")
    NAME_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    PARAMS_JSON_FIELD_NUMBER: _ClassVar[int]
    GATE_FIELD_NUMBER: _ClassVar[int]
    name: str
    kind: str
    params_json: str
    gate: bool
    def __init__(self, name: _Optional[str] = ..., kind: _Optional[str] = ..., params_json: _Optional[str] = ..., gate: _Optional[bool] = ...) -> None: ...

class Budget(_message.Message):
    __slots__ = ("max_turns", "max_tokens", "max_tokens_per_turn", "wall_s", "tool_s")
    MAX_TURNS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_PER_TURN_FIELD_NUMBER: _ClassVar[int]
    WALL_S_FIELD_NUMBER: _ClassVar[int]
    TOOL_S_FIELD_NUMBER: _ClassVar[int]
    max_turns: int
    max_tokens: int
    max_tokens_per_turn: int
    wall_s: float
    tool_s: float
    def __init__(self, max_turns: _Optional[int] = ..., max_tokens: _Optional[int] = ..., max_tokens_per_turn: _Optional[int] = ..., wall_s: _Optional[float] = ..., tool_s: _Optional[float] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ...) -> None: ...

class Task(_message.Message):
    __slots__ = ("header", "task_id", "group_id", "domain", "prompt", "tools", "sandbox", "verifier", "budget", "assertions", "group_size", "purpose", "tier", "seed", "difficulty", "priority", "sampling", "source", "index", "epoch", "min_policy_version", "suite")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    DOMAIN_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    SANDBOX_FIELD_NUMBER: _ClassVar[int]
    VERIFIER_FIELD_NUMBER: _ClassVar[int]
    BUDGET_FIELD_NUMBER: _ClassVar[int]
    ASSERTIONS_FIELD_NUMBER: _ClassVar[int]
    GROUP_SIZE_FIELD_NUMBER: _ClassVar[int]
    PURPOSE_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    DIFFICULTY_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MIN_POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    SUITE_FIELD_NUMBER: _ClassVar[int]
    header: Header
    task_id: str
    group_id: str
    domain: str
    prompt: _containers.RepeatedCompositeFieldContainer[Message]
    tools: _containers.RepeatedCompositeFieldContainer[ToolSpec]
    sandbox: SandboxSpec
    verifier: VerifierSpec
    budget: Budget
    assertions: _containers.RepeatedCompositeFieldContainer[Assertion]
    group_size: int
    purpose: Purpose
    tier: Tier
    seed: int
    difficulty: float
    priority: int
    sampling: SamplingParams
    source: str
    index: int
    epoch: int
    min_policy_version: int
    suite: str
    def __init__(self, header: _Optional[_Union[Header, _Mapping]] = ..., task_id: _Optional[str] = ..., group_id: _Optional[str] = ..., domain: _Optional[str] = ..., prompt: _Optional[_Iterable[_Union[Message, _Mapping]]] = ..., tools: _Optional[_Iterable[_Union[ToolSpec, _Mapping]]] = ..., sandbox: _Optional[_Union[SandboxSpec, _Mapping]] = ..., verifier: _Optional[_Union[VerifierSpec, _Mapping]] = ..., budget: _Optional[_Union[Budget, _Mapping]] = ..., assertions: _Optional[_Iterable[_Union[Assertion, _Mapping]]] = ..., group_size: _Optional[int] = ..., purpose: _Optional[_Union[Purpose, str]] = ..., tier: _Optional[_Union[Tier, str]] = ..., seed: _Optional[int] = ..., difficulty: _Optional[float] = ..., priority: _Optional[int] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., source: _Optional[str] = ..., index: _Optional[int] = ..., epoch: _Optional[int] = ..., min_policy_version: _Optional[int] = ..., suite: _Optional[str] = ...) -> None: ...

class Span(_message.Message):
    __slots__ = ("start", "length")
    START_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    start: int
    length: int
    def __init__(self, start: _Optional[int] = ..., length: _Optional[int] = ...) -> None: ...

class VersionSpan(_message.Message):
    __slots__ = ("policy_version", "start", "length")
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    policy_version: int
    start: int
    length: int
    def __init__(self, policy_version: _Optional[int] = ..., start: _Optional[int] = ..., length: _Optional[int] = ...) -> None: ...

class TokenSequence(_message.Message):
    __slots__ = ("token_ids", "logprobs", "sampled", "versions")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    token_ids: bytes
    logprobs: bytes
    sampled: _containers.RepeatedCompositeFieldContainer[Span]
    versions: _containers.RepeatedCompositeFieldContainer[VersionSpan]
    def __init__(self, token_ids: _Optional[bytes] = ..., logprobs: _Optional[bytes] = ..., sampled: _Optional[_Iterable[_Union[Span, _Mapping]]] = ..., versions: _Optional[_Iterable[_Union[VersionSpan, _Mapping]]] = ...) -> None: ...

class ToolResult(_message.Message):
    __slots__ = ("tool_call_id", "name", "status", "content", "exit_code", "dropped_bytes", "wall_s", "error")
    TOOL_CALL_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    DROPPED_BYTES_FIELD_NUMBER: _ClassVar[int]
    WALL_S_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    tool_call_id: str
    name: str
    status: ToolStatus
    content: str
    exit_code: int
    dropped_bytes: int
    wall_s: float
    error: str
    def __init__(self, tool_call_id: _Optional[str] = ..., name: _Optional[str] = ..., status: _Optional[_Union[ToolStatus, str]] = ..., content: _Optional[str] = ..., exit_code: _Optional[int] = ..., dropped_bytes: _Optional[int] = ..., wall_s: _Optional[float] = ..., error: _Optional[str] = ...) -> None: ...

class Turn(_message.Message):
    __slots__ = ("index", "assistant", "sequence", "sampled", "finish_reason", "tool_results", "started_at", "generate_s", "tool_s")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    ASSISTANT_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    TOOL_RESULTS_FIELD_NUMBER: _ClassVar[int]
    STARTED_AT_FIELD_NUMBER: _ClassVar[int]
    GENERATE_S_FIELD_NUMBER: _ClassVar[int]
    TOOL_S_FIELD_NUMBER: _ClassVar[int]
    index: int
    assistant: Message
    sequence: int
    sampled: Span
    finish_reason: FinishReason
    tool_results: _containers.RepeatedCompositeFieldContainer[ToolResult]
    started_at: _timestamp_pb2.Timestamp
    generate_s: float
    tool_s: float
    def __init__(self, index: _Optional[int] = ..., assistant: _Optional[_Union[Message, _Mapping]] = ..., sequence: _Optional[int] = ..., sampled: _Optional[_Union[Span, _Mapping]] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., tool_results: _Optional[_Iterable[_Union[ToolResult, _Mapping]]] = ..., started_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., generate_s: _Optional[float] = ..., tool_s: _Optional[float] = ...) -> None: ...

class EvidenceItem(_message.Message):
    __slots__ = ("name", "value", "detail")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: float
    detail: str
    def __init__(self, name: _Optional[str] = ..., value: _Optional[float] = ..., detail: _Optional[str] = ...) -> None: ...

class Evidence(_message.Message):
    __slots__ = ("verifier", "validity", "invalid_reason", "items", "wall_s")
    VERIFIER_FIELD_NUMBER: _ClassVar[int]
    VALIDITY_FIELD_NUMBER: _ClassVar[int]
    INVALID_REASON_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    WALL_S_FIELD_NUMBER: _ClassVar[int]
    verifier: str
    validity: Validity
    invalid_reason: str
    items: _containers.RepeatedCompositeFieldContainer[EvidenceItem]
    wall_s: float
    def __init__(self, verifier: _Optional[str] = ..., validity: _Optional[_Union[Validity, str]] = ..., invalid_reason: _Optional[str] = ..., items: _Optional[_Iterable[_Union[EvidenceItem, _Mapping]]] = ..., wall_s: _Optional[float] = ...) -> None: ...

class Outcome(_message.Message):
    __slots__ = ("status", "reason", "error")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    status: OutcomeStatus
    reason: str
    error: str
    def __init__(self, status: _Optional[_Union[OutcomeStatus, str]] = ..., reason: _Optional[str] = ..., error: _Optional[str] = ...) -> None: ...

class Timings(_message.Message):
    __slots__ = ("started_at", "finished_at", "queue_s", "generate_s", "tool_s", "sandbox_wait_s", "verify_s")
    STARTED_AT_FIELD_NUMBER: _ClassVar[int]
    FINISHED_AT_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    GENERATE_S_FIELD_NUMBER: _ClassVar[int]
    TOOL_S_FIELD_NUMBER: _ClassVar[int]
    SANDBOX_WAIT_S_FIELD_NUMBER: _ClassVar[int]
    VERIFY_S_FIELD_NUMBER: _ClassVar[int]
    started_at: _timestamp_pb2.Timestamp
    finished_at: _timestamp_pb2.Timestamp
    queue_s: float
    generate_s: float
    tool_s: float
    sandbox_wait_s: float
    verify_s: float
    def __init__(self, started_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., finished_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., queue_s: _Optional[float] = ..., generate_s: _Optional[float] = ..., tool_s: _Optional[float] = ..., sandbox_wait_s: _Optional[float] = ..., verify_s: _Optional[float] = ...) -> None: ...

class Trajectory(_message.Message):
    __slots__ = ("header", "rollout_id", "task_id", "group_id", "sample_index", "attempt", "domain", "purpose", "group_size", "prompt", "sequences", "turns", "evidence", "outcome", "timings", "policy_version_min", "policy_version_max", "worker_id", "sandbox_id", "sampling", "suite", "seed", "difficulty", "sampled_tokens")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_ID_FIELD_NUMBER: _ClassVar[int]
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    DOMAIN_FIELD_NUMBER: _ClassVar[int]
    PURPOSE_FIELD_NUMBER: _ClassVar[int]
    GROUP_SIZE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    TURNS_FIELD_NUMBER: _ClassVar[int]
    EVIDENCE_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_MIN_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_MAX_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    SANDBOX_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SUITE_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    DIFFICULTY_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    header: Header
    rollout_id: str
    task_id: str
    group_id: str
    sample_index: int
    attempt: int
    domain: str
    purpose: Purpose
    group_size: int
    prompt: _containers.RepeatedCompositeFieldContainer[Message]
    sequences: _containers.RepeatedCompositeFieldContainer[TokenSequence]
    turns: _containers.RepeatedCompositeFieldContainer[Turn]
    evidence: Evidence
    outcome: Outcome
    timings: Timings
    policy_version_min: int
    policy_version_max: int
    worker_id: str
    sandbox_id: str
    sampling: SamplingParams
    suite: str
    seed: int
    difficulty: float
    sampled_tokens: int
    def __init__(self, header: _Optional[_Union[Header, _Mapping]] = ..., rollout_id: _Optional[str] = ..., task_id: _Optional[str] = ..., group_id: _Optional[str] = ..., sample_index: _Optional[int] = ..., attempt: _Optional[int] = ..., domain: _Optional[str] = ..., purpose: _Optional[_Union[Purpose, str]] = ..., group_size: _Optional[int] = ..., prompt: _Optional[_Iterable[_Union[Message, _Mapping]]] = ..., sequences: _Optional[_Iterable[_Union[TokenSequence, _Mapping]]] = ..., turns: _Optional[_Iterable[_Union[Turn, _Mapping]]] = ..., evidence: _Optional[_Union[Evidence, _Mapping]] = ..., outcome: _Optional[_Union[Outcome, _Mapping]] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ..., policy_version_min: _Optional[int] = ..., policy_version_max: _Optional[int] = ..., worker_id: _Optional[str] = ..., sandbox_id: _Optional[str] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., suite: _Optional[str] = ..., seed: _Optional[int] = ..., difficulty: _Optional[float] = ..., sampled_tokens: _Optional[int] = ...) -> None: ...

class RewardComponent(_message.Message):
    __slots__ = ("name", "value", "weight")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: float
    weight: float
    def __init__(self, name: _Optional[str] = ..., value: _Optional[float] = ..., weight: _Optional[float] = ...) -> None: ...

class NormaliserState(_message.Message):
    __slots__ = ("kind", "mean", "std", "count")
    KIND_FIELD_NUMBER: _ClassVar[int]
    MEAN_FIELD_NUMBER: _ClassVar[int]
    STD_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    kind: str
    mean: float
    std: float
    count: int
    def __init__(self, kind: _Optional[str] = ..., mean: _Optional[float] = ..., std: _Optional[float] = ..., count: _Optional[int] = ...) -> None: ...

class ScoredTrajectory(_message.Message):
    __slots__ = ("header", "rollout_id", "task_id", "group_id", "sample_index", "attempt", "domain", "purpose", "group_size", "components", "raw", "normalised", "normaliser", "reward_spec_digest", "flags", "validity", "invalid_reason", "sequences", "policy_version_min", "policy_version_max", "suite", "loss_weight")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_ID_FIELD_NUMBER: _ClassVar[int]
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    DOMAIN_FIELD_NUMBER: _ClassVar[int]
    PURPOSE_FIELD_NUMBER: _ClassVar[int]
    GROUP_SIZE_FIELD_NUMBER: _ClassVar[int]
    COMPONENTS_FIELD_NUMBER: _ClassVar[int]
    RAW_FIELD_NUMBER: _ClassVar[int]
    NORMALISED_FIELD_NUMBER: _ClassVar[int]
    NORMALISER_FIELD_NUMBER: _ClassVar[int]
    REWARD_SPEC_DIGEST_FIELD_NUMBER: _ClassVar[int]
    FLAGS_FIELD_NUMBER: _ClassVar[int]
    VALIDITY_FIELD_NUMBER: _ClassVar[int]
    INVALID_REASON_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_MIN_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_MAX_FIELD_NUMBER: _ClassVar[int]
    SUITE_FIELD_NUMBER: _ClassVar[int]
    LOSS_WEIGHT_FIELD_NUMBER: _ClassVar[int]
    header: Header
    rollout_id: str
    task_id: str
    group_id: str
    sample_index: int
    attempt: int
    domain: str
    purpose: Purpose
    group_size: int
    components: _containers.RepeatedCompositeFieldContainer[RewardComponent]
    raw: float
    normalised: float
    normaliser: NormaliserState
    reward_spec_digest: str
    flags: _containers.RepeatedScalarFieldContainer[str]
    validity: Validity
    invalid_reason: str
    sequences: _containers.RepeatedCompositeFieldContainer[TokenSequence]
    policy_version_min: int
    policy_version_max: int
    suite: str
    loss_weight: float
    def __init__(self, header: _Optional[_Union[Header, _Mapping]] = ..., rollout_id: _Optional[str] = ..., task_id: _Optional[str] = ..., group_id: _Optional[str] = ..., sample_index: _Optional[int] = ..., attempt: _Optional[int] = ..., domain: _Optional[str] = ..., purpose: _Optional[_Union[Purpose, str]] = ..., group_size: _Optional[int] = ..., components: _Optional[_Iterable[_Union[RewardComponent, _Mapping]]] = ..., raw: _Optional[float] = ..., normalised: _Optional[float] = ..., normaliser: _Optional[_Union[NormaliserState, _Mapping]] = ..., reward_spec_digest: _Optional[str] = ..., flags: _Optional[_Iterable[str]] = ..., validity: _Optional[_Union[Validity, str]] = ..., invalid_reason: _Optional[str] = ..., sequences: _Optional[_Iterable[_Union[TokenSequence, _Mapping]]] = ..., policy_version_min: _Optional[int] = ..., policy_version_max: _Optional[int] = ..., suite: _Optional[str] = ..., loss_weight: _Optional[float] = ...) -> None: ...

class TrainingSample(_message.Message):
    __slots__ = ("rollout_id", "sample_index", "attempt", "segment", "tokens", "reward", "advantage", "policy_version_min", "policy_version_max", "drop_reason")
    ROLLOUT_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    ADVANTAGE_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_MIN_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_MAX_FIELD_NUMBER: _ClassVar[int]
    DROP_REASON_FIELD_NUMBER: _ClassVar[int]
    rollout_id: str
    sample_index: int
    attempt: int
    segment: int
    tokens: TokenSequence
    reward: float
    advantage: float
    policy_version_min: int
    policy_version_max: int
    drop_reason: str
    def __init__(self, rollout_id: _Optional[str] = ..., sample_index: _Optional[int] = ..., attempt: _Optional[int] = ..., segment: _Optional[int] = ..., tokens: _Optional[_Union[TokenSequence, _Mapping]] = ..., reward: _Optional[float] = ..., advantage: _Optional[float] = ..., policy_version_min: _Optional[int] = ..., policy_version_max: _Optional[int] = ..., drop_reason: _Optional[str] = ...) -> None: ...

class TrainingGroup(_message.Message):
    __slots__ = ("header", "group_id", "task_id", "domain", "group_size", "samples", "advantage_estimator", "close_reason", "drop_reason", "loss_weight", "reward_mean", "reward_std")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    DOMAIN_FIELD_NUMBER: _ClassVar[int]
    GROUP_SIZE_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    ADVANTAGE_ESTIMATOR_FIELD_NUMBER: _ClassVar[int]
    CLOSE_REASON_FIELD_NUMBER: _ClassVar[int]
    DROP_REASON_FIELD_NUMBER: _ClassVar[int]
    LOSS_WEIGHT_FIELD_NUMBER: _ClassVar[int]
    REWARD_MEAN_FIELD_NUMBER: _ClassVar[int]
    REWARD_STD_FIELD_NUMBER: _ClassVar[int]
    header: Header
    group_id: str
    task_id: str
    domain: str
    group_size: int
    samples: _containers.RepeatedCompositeFieldContainer[TrainingSample]
    advantage_estimator: str
    close_reason: CloseReason
    drop_reason: str
    loss_weight: float
    reward_mean: float
    reward_std: float
    def __init__(self, header: _Optional[_Union[Header, _Mapping]] = ..., group_id: _Optional[str] = ..., task_id: _Optional[str] = ..., domain: _Optional[str] = ..., group_size: _Optional[int] = ..., samples: _Optional[_Iterable[_Union[TrainingSample, _Mapping]]] = ..., advantage_estimator: _Optional[str] = ..., close_reason: _Optional[_Union[CloseReason, str]] = ..., drop_reason: _Optional[str] = ..., loss_weight: _Optional[float] = ..., reward_mean: _Optional[float] = ..., reward_std: _Optional[float] = ...) -> None: ...

class TrainingGroupList(_message.Message):
    __slots__ = ("groups",)
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    groups: _containers.RepeatedCompositeFieldContainer[TrainingGroup]
    def __init__(self, groups: _Optional[_Iterable[_Union[TrainingGroup, _Mapping]]] = ...) -> None: ...

class GroupState(_message.Message):
    __slots__ = ("scored", "opened_at_s", "closed", "partition", "absorbed")
    class AbsorbedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    SCORED_FIELD_NUMBER: _ClassVar[int]
    OPENED_AT_S_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    ABSORBED_FIELD_NUMBER: _ClassVar[int]
    scored: _containers.RepeatedCompositeFieldContainer[ScoredTrajectory]
    opened_at_s: float
    closed: bool
    partition: int
    absorbed: _containers.ScalarMap[int, int]
    def __init__(self, scored: _Optional[_Iterable[_Union[ScoredTrajectory, _Mapping]]] = ..., opened_at_s: _Optional[float] = ..., closed: _Optional[bool] = ..., partition: _Optional[int] = ..., absorbed: _Optional[_Mapping[int, int]] = ...) -> None: ...

class SampleUse(_message.Message):
    __slots__ = ("rollout_id", "group_id", "segment", "staleness", "advantage", "reward", "tokens", "ratio_mean", "ratio_max", "clip_fraction", "loss", "drop_reason")
    ROLLOUT_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    ADVANTAGE_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    RATIO_MEAN_FIELD_NUMBER: _ClassVar[int]
    RATIO_MAX_FIELD_NUMBER: _ClassVar[int]
    CLIP_FRACTION_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    DROP_REASON_FIELD_NUMBER: _ClassVar[int]
    rollout_id: str
    group_id: str
    segment: int
    staleness: int
    advantage: float
    reward: float
    tokens: int
    ratio_mean: float
    ratio_max: float
    clip_fraction: float
    loss: float
    drop_reason: str
    def __init__(self, rollout_id: _Optional[str] = ..., group_id: _Optional[str] = ..., segment: _Optional[int] = ..., staleness: _Optional[int] = ..., advantage: _Optional[float] = ..., reward: _Optional[float] = ..., tokens: _Optional[int] = ..., ratio_mean: _Optional[float] = ..., ratio_max: _Optional[float] = ..., clip_fraction: _Optional[float] = ..., loss: _Optional[float] = ..., drop_reason: _Optional[str] = ...) -> None: ...

class TrainingStep(_message.Message):
    __slots__ = ("header", "step", "stage", "policy_version", "samples", "metrics", "tokens", "wait_s", "compute_s")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    HEADER_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_S_FIELD_NUMBER: _ClassVar[int]
    header: Header
    step: int
    stage: str
    policy_version: int
    samples: _containers.RepeatedCompositeFieldContainer[SampleUse]
    metrics: _containers.ScalarMap[str, float]
    tokens: int
    wait_s: float
    compute_s: float
    def __init__(self, header: _Optional[_Union[Header, _Mapping]] = ..., step: _Optional[int] = ..., stage: _Optional[str] = ..., policy_version: _Optional[int] = ..., samples: _Optional[_Iterable[_Union[SampleUse, _Mapping]]] = ..., metrics: _Optional[_Mapping[str, float]] = ..., tokens: _Optional[int] = ..., wait_s: _Optional[float] = ..., compute_s: _Optional[float] = ...) -> None: ...

class CurriculumState(_message.Message):
    __slots__ = ("header", "domain", "sampling_weight", "loss_weight", "stage", "statistics")
    class StatisticsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    HEADER_FIELD_NUMBER: _ClassVar[int]
    DOMAIN_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_WEIGHT_FIELD_NUMBER: _ClassVar[int]
    LOSS_WEIGHT_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    STATISTICS_FIELD_NUMBER: _ClassVar[int]
    header: Header
    domain: str
    sampling_weight: float
    loss_weight: float
    stage: str
    statistics: _containers.ScalarMap[str, float]
    def __init__(self, header: _Optional[_Union[Header, _Mapping]] = ..., domain: _Optional[str] = ..., sampling_weight: _Optional[float] = ..., loss_weight: _Optional[float] = ..., stage: _Optional[str] = ..., statistics: _Optional[_Mapping[str, float]] = ...) -> None: ...

class EvaluationResult(_message.Message):
    __slots__ = ("header", "suite", "domain", "task_id", "rollout_id", "policy_version", "score", "validity", "invalid_reason", "tasks", "baseline", "final")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    SUITE_FIELD_NUMBER: _ClassVar[int]
    DOMAIN_FIELD_NUMBER: _ClassVar[int]
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_ID_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    VALIDITY_FIELD_NUMBER: _ClassVar[int]
    INVALID_REASON_FIELD_NUMBER: _ClassVar[int]
    TASKS_FIELD_NUMBER: _ClassVar[int]
    BASELINE_FIELD_NUMBER: _ClassVar[int]
    FINAL_FIELD_NUMBER: _ClassVar[int]
    header: Header
    suite: str
    domain: str
    task_id: str
    rollout_id: str
    policy_version: int
    score: float
    validity: Validity
    invalid_reason: str
    tasks: int
    baseline: bool
    final: bool
    def __init__(self, header: _Optional[_Union[Header, _Mapping]] = ..., suite: _Optional[str] = ..., domain: _Optional[str] = ..., task_id: _Optional[str] = ..., rollout_id: _Optional[str] = ..., policy_version: _Optional[int] = ..., score: _Optional[float] = ..., validity: _Optional[_Union[Validity, str]] = ..., invalid_reason: _Optional[str] = ..., tasks: _Optional[int] = ..., baseline: _Optional[bool] = ..., final: _Optional[bool] = ...) -> None: ...

class DeadLetter(_message.Message):
    __slots__ = ("header", "topic", "partition", "offset", "key", "value", "headers", "service", "error_code", "error", "hint", "task_id", "rollout_id", "samples")
    class HeadersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: bytes
        def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...
    HEADER_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    HEADERS_FIELD_NUMBER: _ClassVar[int]
    SERVICE_FIELD_NUMBER: _ClassVar[int]
    ERROR_CODE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    HINT_FIELD_NUMBER: _ClassVar[int]
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    header: Header
    topic: str
    partition: int
    offset: int
    key: bytes
    value: bytes
    headers: _containers.ScalarMap[str, bytes]
    service: str
    error_code: str
    error: str
    hint: str
    task_id: str
    rollout_id: str
    samples: int
    def __init__(self, header: _Optional[_Union[Header, _Mapping]] = ..., topic: _Optional[str] = ..., partition: _Optional[int] = ..., offset: _Optional[int] = ..., key: _Optional[bytes] = ..., value: _Optional[bytes] = ..., headers: _Optional[_Mapping[str, bytes]] = ..., service: _Optional[str] = ..., error_code: _Optional[str] = ..., error: _Optional[str] = ..., hint: _Optional[str] = ..., task_id: _Optional[str] = ..., rollout_id: _Optional[str] = ..., samples: _Optional[int] = ...) -> None: ...
