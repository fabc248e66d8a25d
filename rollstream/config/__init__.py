"""Typed configuration of a run."""

from rollstream.config.load import dump, load
from rollstream.config.model import Config

__all__ = ["Config", "dump", "load"]
