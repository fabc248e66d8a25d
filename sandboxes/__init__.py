"""Sandboxes: an executor service over gRPC, isolation backends, and the client."""

import os

# The executor forks sessions from a process with gRPC threads. The children exec at once, so gRPC's
# fork handlers have nothing to protect and would only hold up each fork. Read by gRPC when it is
# imported.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
