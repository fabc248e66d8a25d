"""The local supervisor: every service as its own process, with health checks and restarts."""
