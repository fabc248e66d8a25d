from rollstream.v1 import events_pb2 as _events_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CreateRequest(_message.Message):
    __slots__ = ("request_id", "spec", "lease_s")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    spec: _events_pb2.SandboxSpec
    lease_s: float
    def __init__(self, request_id: _Optional[str] = ..., spec: _Optional[_Union[_events_pb2.SandboxSpec, _Mapping]] = ..., lease_s: _Optional[float] = ...) -> None: ...

class CreateResponse(_message.Message):
    __slots__ = ("session_id", "tier", "missing", "lease_s", "wait_s")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    tier: str
    missing: _containers.RepeatedScalarFieldContainer[str]
    lease_s: float
    wait_s: float
    def __init__(self, session_id: _Optional[str] = ..., tier: _Optional[str] = ..., missing: _Optional[_Iterable[str]] = ..., lease_s: _Optional[float] = ..., wait_s: _Optional[float] = ...) -> None: ...

class ListRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SessionInfo(_message.Message):
    __slots__ = ("session_id", "toolchain", "age_s", "lease_left_s", "commands")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TOOLCHAIN_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    LEASE_LEFT_S_FIELD_NUMBER: _ClassVar[int]
    COMMANDS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    toolchain: str
    age_s: float
    lease_left_s: float
    commands: int
    def __init__(self, session_id: _Optional[str] = ..., toolchain: _Optional[str] = ..., age_s: _Optional[float] = ..., lease_left_s: _Optional[float] = ..., commands: _Optional[int] = ...) -> None: ...

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

class CapacityRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ToolchainCapacity(_message.Message):
    __slots__ = ("toolchain", "ready")
    TOOLCHAIN_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    toolchain: str
    ready: int
    def __init__(self, toolchain: _Optional[str] = ..., ready: _Optional[int] = ...) -> None: ...

class CapacityResponse(_message.Message):
    __slots__ = ("max_sessions", "live_sessions", "tier", "missing", "toolchains")
    MAX_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    LIVE_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    TOOLCHAINS_FIELD_NUMBER: _ClassVar[int]
    max_sessions: int
    live_sessions: int
    tier: str
    missing: _containers.RepeatedScalarFieldContainer[str]
    toolchains: _containers.RepeatedCompositeFieldContainer[ToolchainCapacity]
    def __init__(self, max_sessions: _Optional[int] = ..., live_sessions: _Optional[int] = ..., tier: _Optional[str] = ..., missing: _Optional[_Iterable[str]] = ..., toolchains: _Optional[_Iterable[_Union[ToolchainCapacity, _Mapping]]] = ...) -> None: ...

class ExecRequest(_message.Message):
    __slots__ = ("session_id", "argv", "python", "stdin", "cwd", "env", "timeout_s", "output_bytes")
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
    session_id: str
    argv: Argv
    python: str
    stdin: bytes
    cwd: str
    env: _containers.ScalarMap[str, str]
    timeout_s: float
    output_bytes: int
    def __init__(self, session_id: _Optional[str] = ..., argv: _Optional[_Union[Argv, _Mapping]] = ..., python: _Optional[str] = ..., stdin: _Optional[bytes] = ..., cwd: _Optional[str] = ..., env: _Optional[_Mapping[str, str]] = ..., timeout_s: _Optional[float] = ..., output_bytes: _Optional[int] = ...) -> None: ...

class Argv(_message.Message):
    __slots__ = ("values",)
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, values: _Optional[_Iterable[str]] = ...) -> None: ...

class ExecResponse(_message.Message):
    __slots__ = ("seq", "stdout", "stderr", "exited")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    STDOUT_FIELD_NUMBER: _ClassVar[int]
    STDERR_FIELD_NUMBER: _ClassVar[int]
    EXITED_FIELD_NUMBER: _ClassVar[int]
    seq: int
    stdout: bytes
    stderr: bytes
    exited: Exited
    def __init__(self, seq: _Optional[int] = ..., stdout: _Optional[bytes] = ..., stderr: _Optional[bytes] = ..., exited: _Optional[_Union[Exited, _Mapping]] = ...) -> None: ...

class Exited(_message.Message):
    __slots__ = ("code", "reason", "wall_s", "cpu_s", "max_rss_bytes", "dropped_bytes")
    CODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    WALL_S_FIELD_NUMBER: _ClassVar[int]
    CPU_S_FIELD_NUMBER: _ClassVar[int]
    MAX_RSS_BYTES_FIELD_NUMBER: _ClassVar[int]
    DROPPED_BYTES_FIELD_NUMBER: _ClassVar[int]
    code: int
    reason: str
    wall_s: float
    cpu_s: float
    max_rss_bytes: int
    dropped_bytes: int
    def __init__(self, code: _Optional[int] = ..., reason: _Optional[str] = ..., wall_s: _Optional[float] = ..., cpu_s: _Optional[float] = ..., max_rss_bytes: _Optional[int] = ..., dropped_bytes: _Optional[int] = ...) -> None: ...

class PutFilesRequest(_message.Message):
    __slots__ = ("session_id", "files")
    class FilesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: bytes
        def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    files: _containers.ScalarMap[str, bytes]
    def __init__(self, session_id: _Optional[str] = ..., files: _Optional[_Mapping[str, bytes]] = ...) -> None: ...

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
