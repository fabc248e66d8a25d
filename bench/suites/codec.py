"""Encoding and decoding of training groups, per sample of 1,024 tokens with log-probabilities."""

from __future__ import annotations

import time

import numpy as np

from bench.harness import GROUP, training_group
from bench.report import Report
from rollstream import codecs
from rollstream.topics import REPLAY

NAMES = ("codec.encode.samples_per_s.L1024", "codec.decode.samples_per_s.L1024")
RUNS, GROUPS, LENGTH = 7, 400, 1024


def run(report: Report) -> None:
    rng = np.random.default_rng(0)
    groups = [training_group(rng, i, LENGTH) for i in range(GROUPS)]
    encode, decode = [], []
    for _ in range(RUNS):
        began = time.perf_counter()
        encoded = [codecs.encode(group) for group in groups]
        encode.append(GROUPS * GROUP / (time.perf_counter() - began))
        began = time.perf_counter()
        for value in encoded:
            group = codecs.decode(REPLAY, value)
            for sample in group.samples:  # type: ignore[attr-defined]
                codecs.token_array(sample.tokens)
                codecs.logprob_array(sample.tokens)
        decode.append(GROUPS * GROUP / (time.perf_counter() - began))
    report.median("codec.encode.samples_per_s.L1024", encode, unit="samples/s")
    report.median("codec.decode.samples_per_s.L1024", decode, unit="samples/s")
