from rollstream.v1 import events_pb2 as _events_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CreateRequest(_message.Message):
    __slots__ = ("request_id", "spec", "lease_s", "from_snapshot", "from_blob")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    FROM_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    FROM_BLOB_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    spec: _events_pb2.SandboxSpec
    lease_s: float
    from_snapshot: str
    from_blob: _events_pb2.BlobRef
    def __init__(self, request_id: _Optional[str] = ..., spec: _Optional[_Union[_events_pb2.SandboxSpec, _Mapping]] = ..., lease_s: _Optional[float] = ..., from_snapshot: _Optional[str] = ..., from_blob: _Optional[_Union[_events_pb2.BlobRef, _Mapping]] = ...) -> None: ...

class CreateResponse(_message.Message):
    __slots__ = ("session_id", "tier", "missing", "lease_s", "wait_s", "generation")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    tier: str
    missing: _containers.RepeatedScalarFieldContainer[str]
    lease_s: float
    wait_s: float
    generation: int
    def __init__(self, session_id: _Optional[str] = ..., tier: _Optional[str] = ..., missing: _Optional[_Iterable[str]] = ..., lease_s: _Optional[float] = ..., wait_s: _Optional[float] = ..., generation: _Optional[int] = ...) -> None: ...

class GetRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class GetResponse(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: SessionInfo
    def __init__(self, session: _Optional[_Union[SessionInfo, _Mapping]] = ...) -> None: ...

class ListRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SessionInfo(_message.Message):
    __slots__ = ("session_id", "toolchain", "age_s", "lease_left_s", "commands", "generation", "process_id", "memory_bytes")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TOOLCHAIN_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    LEASE_LEFT_S_FIELD_NUMBER: _ClassVar[int]
    COMMANDS_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    PROCESS_ID_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    toolchain: str
    age_s: float
    lease_left_s: float
    commands: int
    generation: int
    process_id: str
    memory_bytes: int
    def __init__(self, session_id: _Optional[str] = ..., toolchain: _Optional[str] = ..., age_s: _Optional[float] = ..., lease_left_s: _Optional[float] = ..., commands: _Optional[int] = ..., generation: _Optional[int] = ..., process_id: _Optional[str] = ..., memory_bytes: _Optional[int] = ...) -> None: ...

class ListResponse(_message.Message):
    __slots__ = ("sessions",)
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    sessions: _containers.RepeatedCompositeFieldContainer[SessionInfo]
    def __init__(self, sessions: _Optional[_Iterable[_Union[SessionInfo, _Mapping]]] = ...) -> None: ...

class RenewLeaseRequest(_message.Message):
    __slots__ = ("session_ids",)
    SESSION_IDS_FIELD_NUMBER: _ClassVar[int]
    session_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, session_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class RenewLeaseResponse(_message.Message):
    __slots__ = ("gone",)
    GONE_FIELD_NUMBER: _ClassVar[int]
    gone: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, gone: _Optional[_Iterable[str]] = ...) -> None: ...

class DestroyRequest(_message.Message):
    __slots__ = ("session_id", "request_id")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    request_id: str
    def __init__(self, session_id: _Optional[str] = ..., request_id: _Optional[str] = ...) -> None: ...

class DestroyResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResetRequest(_message.Message):
    __slots__ = ("request_id", "session_id", "generation")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    session_id: str
    generation: int
    def __init__(self, request_id: _Optional[str] = ..., session_id: _Optional[str] = ..., generation: _Optional[int] = ...) -> None: ...

class ResetResponse(_message.Message):
    __slots__ = ("generation",)
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    generation: int
    def __init__(self, generation: _Optional[int] = ...) -> None: ...

class SnapshotRequest(_message.Message):
    __slots__ = ("request_id", "session_id", "generation")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    session_id: str
    generation: int
    def __init__(self, request_id: _Optional[str] = ..., session_id: _Optional[str] = ..., generation: _Optional[int] = ...) -> None: ...

class SnapshotResponse(_message.Message):
    __slots__ = ("snapshot_id", "layers")
    SNAPSHOT_ID_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    snapshot_id: str
    layers: int
    def __init__(self, snapshot_id: _Optional[str] = ..., layers: _Optional[int] = ...) -> None: ...

class RestoreRequest(_message.Message):
    __slots__ = ("request_id", "session_id", "generation", "snapshot_id", "blob")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_ID_FIELD_NUMBER: _ClassVar[int]
    BLOB_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    session_id: str
    generation: int
    snapshot_id: str
    blob: _events_pb2.BlobRef
    def __init__(self, request_id: _Optional[str] = ..., session_id: _Optional[str] = ..., generation: _Optional[int] = ..., snapshot_id: _Optional[str] = ..., blob: _Optional[_Union[_events_pb2.BlobRef, _Mapping]] = ...) -> None: ...

class RestoreResponse(_message.Message):
    __slots__ = ("generation",)
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    generation: int
    def __init__(self, generation: _Optional[int] = ...) -> None: ...

class ExportSnapshotRequest(_message.Message):
    __slots__ = ("snapshot_id",)
    SNAPSHOT_ID_FIELD_NUMBER: _ClassVar[int]
    snapshot_id: str
    def __init__(self, snapshot_id: _Optional[str] = ...) -> None: ...

class ExportSnapshotResponse(_message.Message):
    __slots__ = ("blob",)
    BLOB_FIELD_NUMBER: _ClassVar[int]
    blob: _events_pb2.BlobRef
    def __init__(self, blob: _Optional[_Union[_events_pb2.BlobRef, _Mapping]] = ...) -> None: ...

class DropSnapshotRequest(_message.Message):
    __slots__ = ("snapshot_id",)
    SNAPSHOT_ID_FIELD_NUMBER: _ClassVar[int]
    snapshot_id: str
    def __init__(self, snapshot_id: _Optional[str] = ...) -> None: ...

class DropSnapshotResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CapacityRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ToolchainCapacity(_message.Message):
    __slots__ = ("toolchain", "ready", "target")
    TOOLCHAIN_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    toolchain: str
    ready: int
    target: int
    def __init__(self, toolchain: _Optional[str] = ..., ready: _Optional[int] = ..., target: _Optional[int] = ...) -> None: ...

class CapacityResponse(_message.Message):
    __slots__ = ("max_sessions", "live_sessions", "tier", "missing", "toolchains", "free_sessions")
    MAX_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    LIVE_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    TOOLCHAINS_FIELD_NUMBER: _ClassVar[int]
    FREE_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    max_sessions: int
    live_sessions: int
    tier: str
    missing: _containers.RepeatedScalarFieldContainer[str]
    toolchains: _containers.RepeatedCompositeFieldContainer[ToolchainCapacity]
    free_sessions: int
    def __init__(self, max_sessions: _Optional[int] = ..., live_sessions: _Optional[int] = ..., tier: _Optional[str] = ..., missing: _Optional[_Iterable[str]] = ..., toolchains: _Optional[_Iterable[_Union[ToolchainCapacity, _Mapping]]] = ..., free_sessions: _Optional[int] = ...) -> None: ...

class ExecRequest(_message.Message):
    __slots__ = ("session_id", "argv", "python", "stdin", "cwd", "env", "timeout_s", "output_bytes", "request_id", "generation", "keep_stdin_open")
    class EnvEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    ARGV_FIELD_NUMBER: _ClassVar[int]
    PYTHON_FIELD_NUMBER: _ClassVar[int]
    STDIN_FIELD_NUMBER: _ClassVar[int]
    CWD_FIELD_NUMBER: _ClassVar[int]
    ENV_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_BYTES_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    KEEP_STDIN_OPEN_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    argv: Argv
    python: str
    stdin: bytes
    cwd: str
    env: _containers.ScalarMap[str, str]
    timeout_s: float
    output_bytes: int
    request_id: str
    generation: int
    keep_stdin_open: bool
    def __init__(self, session_id: _Optional[str] = ..., argv: _Optional[_Union[Argv, _Mapping]] = ..., python: _Optional[str] = ..., stdin: _Optional[bytes] = ..., cwd: _Optional[str] = ..., env: _Optional[_Mapping[str, str]] = ..., timeout_s: _Optional[float] = ..., output_bytes: _Optional[int] = ..., request_id: _Optional[str] = ..., generation: _Optional[int] = ..., keep_stdin_open: _Optional[bool] = ...) -> None: ...

class Argv(_message.Message):
    __slots__ = ("values",)
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, values: _Optional[_Iterable[str]] = ...) -> None: ...

class ExecResponse(_message.Message):
    __slots__ = ("seq", "stdout", "stderr", "exited", "started", "heartbeat", "truncated")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    STDOUT_FIELD_NUMBER: _ClassVar[int]
    STDERR_FIELD_NUMBER: _ClassVar[int]
    EXITED_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    seq: int
    stdout: bytes
    stderr: bytes
    exited: Exited
    started: Started
    heartbeat: Heartbeat
    truncated: Truncated
    def __init__(self, seq: _Optional[int] = ..., stdout: _Optional[bytes] = ..., stderr: _Optional[bytes] = ..., exited: _Optional[_Union[Exited, _Mapping]] = ..., started: _Optional[_Union[Started, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., truncated: _Optional[_Union[Truncated, _Mapping]] = ...) -> None: ...

class Started(_message.Message):
    __slots__ = ("process_id", "generation")
    PROCESS_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    process_id: str
    generation: int
    def __init__(self, process_id: _Optional[str] = ..., generation: _Optional[int] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("elapsed_s",)
    ELAPSED_S_FIELD_NUMBER: _ClassVar[int]
    elapsed_s: float
    def __init__(self, elapsed_s: _Optional[float] = ...) -> None: ...

class Truncated(_message.Message):
    __slots__ = ("stream", "dropped_bytes")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    DROPPED_BYTES_FIELD_NUMBER: _ClassVar[int]
    stream: str
    dropped_bytes: int
    def __init__(self, stream: _Optional[str] = ..., dropped_bytes: _Optional[int] = ...) -> None: ...

class AttachRequest(_message.Message):
    __slots__ = ("session_id", "process_id", "from_seq")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PROCESS_ID_FIELD_NUMBER: _ClassVar[int]
    FROM_SEQ_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    process_id: str
    from_seq: int
    def __init__(self, session_id: _Optional[str] = ..., process_id: _Optional[str] = ..., from_seq: _Optional[int] = ...) -> None: ...

class AttachResponse(_message.Message):
    __slots__ = ("frame",)
    FRAME_FIELD_NUMBER: _ClassVar[int]
    frame: ExecResponse
    def __init__(self, frame: _Optional[_Union[ExecResponse, _Mapping]] = ...) -> None: ...

class WriteStdinRequest(_message.Message):
    __slots__ = ("session_id", "process_id", "data", "eof")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PROCESS_ID_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    EOF_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    process_id: str
    data: bytes
    eof: bool
    def __init__(self, session_id: _Optional[str] = ..., process_id: _Optional[str] = ..., data: _Optional[bytes] = ..., eof: _Optional[bool] = ...) -> None: ...

class WriteStdinResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SignalRequest(_message.Message):
    __slots__ = ("session_id", "process_id", "signal")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PROCESS_ID_FIELD_NUMBER: _ClassVar[int]
    SIGNAL_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    process_id: str
    signal: int
    def __init__(self, session_id: _Optional[str] = ..., process_id: _Optional[str] = ..., signal: _Optional[int] = ...) -> None: ...

class SignalResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Exited(_message.Message):
    __slots__ = ("code", "reason", "wall_s", "cpu_s", "max_rss_bytes", "dropped_bytes", "signal", "limits_hit")
    CODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    WALL_S_FIELD_NUMBER: _ClassVar[int]
    CPU_S_FIELD_NUMBER: _ClassVar[int]
    MAX_RSS_BYTES_FIELD_NUMBER: _ClassVar[int]
    DROPPED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SIGNAL_FIELD_NUMBER: _ClassVar[int]
    LIMITS_HIT_FIELD_NUMBER: _ClassVar[int]
    code: int
    reason: str
    wall_s: float
    cpu_s: float
    max_rss_bytes: int
    dropped_bytes: int
    signal: int
    limits_hit: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, code: _Optional[int] = ..., reason: _Optional[str] = ..., wall_s: _Optional[float] = ..., cpu_s: _Optional[float] = ..., max_rss_bytes: _Optional[int] = ..., dropped_bytes: _Optional[int] = ..., signal: _Optional[int] = ..., limits_hit: _Optional[_Iterable[str]] = ...) -> None: ...

class PutFilesRequest(_message.Message):
    __slots__ = ("session_id", "files", "generation", "hidden")
    class FilesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: bytes
        def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    files: _containers.ScalarMap[str, bytes]
    generation: int
    hidden: bool
    def __init__(self, session_id: _Optional[str] = ..., files: _Optional[_Mapping[str, bytes]] = ..., generation: _Optional[int] = ..., hidden: _Optional[bool] = ...) -> None: ...

class PutFilesResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetFilesRequest(_message.Message):
    __slots__ = ("session_id", "paths")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PATHS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    paths: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, session_id: _Optional[str] = ..., paths: _Optional[_Iterable[str]] = ...) -> None: ...

class GetFilesResponse(_message.Message):
    __slots__ = ("files",)
    class FilesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: bytes
        def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...
    FILES_FIELD_NUMBER: _ClassVar[int]
    files: _containers.ScalarMap[str, bytes]
    def __init__(self, files: _Optional[_Mapping[str, bytes]] = ...) -> None: ...

class PutFileRequest(_message.Message):
    __slots__ = ("header", "chunk", "sha256")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    header: PutFileHeader
    chunk: bytes
    sha256: str
    def __init__(self, header: _Optional[_Union[PutFileHeader, _Mapping]] = ..., chunk: _Optional[bytes] = ..., sha256: _Optional[str] = ...) -> None: ...

class PutFileHeader(_message.Message):
    __slots__ = ("session_id", "path", "mode", "generation")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    path: str
    mode: int
    generation: int
    def __init__(self, session_id: _Optional[str] = ..., path: _Optional[str] = ..., mode: _Optional[int] = ..., generation: _Optional[int] = ...) -> None: ...

class PutFileResponse(_message.Message):
    __slots__ = ("size_bytes", "sha256")
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    size_bytes: int
    sha256: str
    def __init__(self, size_bytes: _Optional[int] = ..., sha256: _Optional[str] = ...) -> None: ...

class GetFileRequest(_message.Message):
    __slots__ = ("session_id", "path")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    path: str
    def __init__(self, session_id: _Optional[str] = ..., path: _Optional[str] = ...) -> None: ...

class GetFileResponse(_message.Message):
    __slots__ = ("chunk", "sha256")
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    chunk: bytes
    sha256: str
    def __init__(self, chunk: _Optional[bytes] = ..., sha256: _Optional[str] = ...) -> None: ...

class FileInfo(_message.Message):
    __slots__ = ("path", "kind", "size_bytes", "mode", "modified_s", "target")
    PATH_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    MODIFIED_S_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    path: str
    kind: str
    size_bytes: int
    mode: int
    modified_s: float
    target: str
    def __init__(self, path: _Optional[str] = ..., kind: _Optional[str] = ..., size_bytes: _Optional[int] = ..., mode: _Optional[int] = ..., modified_s: _Optional[float] = ..., target: _Optional[str] = ...) -> None: ...

class StatFileRequest(_message.Message):
    __slots__ = ("session_id", "path")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    path: str
    def __init__(self, session_id: _Optional[str] = ..., path: _Optional[str] = ...) -> None: ...

class StatFileResponse(_message.Message):
    __slots__ = ("file",)
    FILE_FIELD_NUMBER: _ClassVar[int]
    file: FileInfo
    def __init__(self, file: _Optional[_Union[FileInfo, _Mapping]] = ...) -> None: ...

class ListFilesRequest(_message.Message):
    __slots__ = ("session_id", "path", "recursive", "limit")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    RECURSIVE_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    path: str
    recursive: bool
    limit: int
    def __init__(self, session_id: _Optional[str] = ..., path: _Optional[str] = ..., recursive: _Optional[bool] = ..., limit: _Optional[int] = ...) -> None: ...

class ListFilesResponse(_message.Message):
    __slots__ = ("files", "truncated")
    FILES_FIELD_NUMBER: _ClassVar[int]
    TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    files: _containers.RepeatedCompositeFieldContainer[FileInfo]
    truncated: bool
    def __init__(self, files: _Optional[_Iterable[_Union[FileInfo, _Mapping]]] = ..., truncated: _Optional[bool] = ...) -> None: ...

class RemoveFileRequest(_message.Message):
    __slots__ = ("session_id", "path", "generation")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    path: str
    generation: int
    def __init__(self, session_id: _Optional[str] = ..., path: _Optional[str] = ..., generation: _Optional[int] = ...) -> None: ...

class RemoveFileResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DiffRequest(_message.Message):
    __slots__ = ("session_id", "snapshot_id")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    snapshot_id: str
    def __init__(self, session_id: _Optional[str] = ..., snapshot_id: _Optional[str] = ...) -> None: ...

class Change(_message.Message):
    __slots__ = ("path", "kind")
    PATH_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    path: str
    kind: str
    def __init__(self, path: _Optional[str] = ..., kind: _Optional[str] = ...) -> None: ...

class DiffResponse(_message.Message):
    __slots__ = ("changes", "truncated")
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    changes: _containers.RepeatedCompositeFieldContainer[Change]
    truncated: bool
    def __init__(self, changes: _Optional[_Iterable[_Union[Change, _Mapping]]] = ..., truncated: _Optional[bool] = ...) -> None: ...
