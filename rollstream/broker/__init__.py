"""The embedded Apache Kafka; services know nothing of it but its bootstrap servers."""

from rollstream.broker.embedded import EmbeddedBroker, EmbeddedCluster
from rollstream.broker.java import find_jars, find_java

__all__ = ["EmbeddedBroker", "EmbeddedCluster", "find_jars", "find_java"]
