from rollstream.v1 import events_pb2 as _events_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WeightFile(_message.Message):
    __slots__ = ("path", "sha256", "size_bytes")
    PATH_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    path: str
    sha256: str
    size_bytes: int
    def __init__(self, path: _Optional[str] = ..., sha256: _Optional[str] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class PolicyVersion(_message.Message):
    __slots__ = ("header", "policy", "version", "uri", "files", "digest", "step", "stage", "transport", "dtype", "baseline", "final")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    URI_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    BASELINE_FIELD_NUMBER: _ClassVar[int]
    FINAL_FIELD_NUMBER: _ClassVar[int]
    header: _events_pb2.Header
    policy: str
    version: int
    uri: str
    files: _containers.RepeatedCompositeFieldContainer[WeightFile]
    digest: str
    step: int
    stage: str
    transport: str
    dtype: str
    baseline: bool
    final: bool
    def __init__(self, header: _Optional[_Union[_events_pb2.Header, _Mapping]] = ..., policy: _Optional[str] = ..., version: _Optional[int] = ..., uri: _Optional[str] = ..., files: _Optional[_Iterable[_Union[WeightFile, _Mapping]]] = ..., digest: _Optional[str] = ..., step: _Optional[int] = ..., stage: _Optional[str] = ..., transport: _Optional[str] = ..., dtype: _Optional[str] = ..., baseline: _Optional[bool] = ..., final: _Optional[bool] = ...) -> None: ...
