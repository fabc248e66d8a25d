-- One table per kind of event, written by the sink and by nothing else.
--
-- _log, _topic, _partition, _offset: where the row came from (_log names the broker's log, so that a fresh broker's offsets
-- never collide with an old one's). ReplacingMergeTree by the natural key is the last net below deduplication tokens; views
-- read FINAL, so that a row that came twice counts once. IF NOT EXISTS: a migration that was interrupted begins anew.

CREATE TABLE IF NOT EXISTS tasks
(
    run_id LowCardinality(String),
    task_id String,
    group_id String,
    domain LowCardinality(String),
    purpose LowCardinality(String),
    tier LowCardinality(String),
    suite LowCardinality(String),
    group_size UInt32,
    -- Ids of its samples, in order of sample_index: they are functions of task_id.
    rollout_ids Array(String),
    difficulty Float64,
    source String,
    source_index UInt64,
    epoch UInt32,
    prompt String CODEC(ZSTD(3)),
    verifier LowCardinality(String),
    occurred_at DateTime64(6, 'UTC') CODEC(Delta, ZSTD(1)),
    _log LowCardinality(String), _topic LowCardinality(String), _partition UInt32, _offset UInt64 CODEC(Delta, ZSTD(1))
)
ENGINE = ReplacingMergeTree
ORDER BY (run_id, task_id)
SETTINGS non_replicated_deduplication_window = 10000;

CREATE TABLE IF NOT EXISTS trajectories
(
    run_id LowCardinality(String),
    rollout_id String,
    attempt UInt32,
    task_id String,
    group_id String,
    sample_index UInt32,
    domain LowCardinality(String),
    purpose LowCardinality(String),
    suite LowCardinality(String),
    status LowCardinality(String),
    -- Why it ended: stop, max_turns, max_tokens, wall, context, sandbox_lost, ...
    reason LowCardinality(String),
    error String,
    turns UInt32,
    tool_calls UInt32,
    tool_failures UInt32,
    -- All positions of all sequences, prompt included; sampled_tokens are the policy's own.
    tokens UInt32,
    sampled_tokens UInt32,
    -- Weights change while a rollout is in flight: the oldest and the newest version that sampled it.
    policy_version_min UInt64,
    policy_version_max UInt64,
    -- invalid: the measurement failed, so that there is no reward.
    validity LowCardinality(String),
    evidence Map(LowCardinality(String), Float64),
    temperature Float64,
    queue_s Float64, generate_s Float64, tool_s Float64, sandbox_wait_s Float64, verify_s Float64,
    started_at DateTime64(6, 'UTC') CODEC(Delta, ZSTD(1)),
    finished_at DateTime64(6, 'UTC') CODEC(Delta, ZSTD(1)),
    worker_id LowCardinality(String),
    sandbox_id String,
    -- W3C trace id, 32 hex digits; empty when the event carried none.
    trace_id String,
    _log LowCardinality(String), _topic LowCardinality(String), _partition UInt32, _offset UInt64 CODEC(Delta, ZSTD(1)),
    INDEX i_rollout rollout_id TYPE bloom_filter(0.001) GRANULARITY 1
)
-- Every attempt is kept; the one that counts is the one that was scored.
ENGINE = ReplacingMergeTree
ORDER BY (run_id, group_id, rollout_id, attempt)
SETTINGS non_replicated_deduplication_window = 10000;

CREATE TABLE IF NOT EXISTS turns
(
    run_id LowCardinality(String),
    rollout_id String,
    attempt UInt32,
    turn UInt32,
    text String CODEC(ZSTD(3)),
    tool_names Array(LowCardinality(String)),
    tool_arguments Array(String) CODEC(ZSTD(3)),
    tool_statuses Array(LowCardinality(String)),
    tool_outputs Array(String) CODEC(ZSTD(3)),
    finish_reason LowCardinality(String),
    sampled_tokens UInt32,
    generate_s Float64,
    tool_s Float64
)
ENGINE = ReplacingMergeTree
ORDER BY (run_id, rollout_id, attempt, turn)
SETTINGS non_replicated_deduplication_window = 10000;

-- Heavy and apart: read by rollout, never scanned.
CREATE TABLE IF NOT EXISTS tokens
(
    run_id LowCardinality(String),
    rollout_id String,
    attempt UInt32,
    sequence UInt32,
    token_ids Array(Int32) CODEC(ZSTD(3)),
    -- Log-probabilities of the sampled tokens, in order.
    logprobs Array(Float32) CODEC(ZSTD(3)),
    -- Runs of sampled positions (the loss mask), and the policy version of each run.
    sampled_starts Array(UInt32) CODEC(ZSTD(3)),
    sampled_lengths Array(UInt32) CODEC(ZSTD(3)),
    versions Array(UInt64) CODEC(ZSTD(3)),
    version_starts Array(UInt32) CODEC(ZSTD(3)),
    version_lengths Array(UInt32) CODEC(ZSTD(3))
)
ENGINE = ReplacingMergeTree
ORDER BY (run_id, rollout_id, attempt, sequence)
SETTINGS non_replicated_deduplication_window = 10000, index_granularity = 1024;

CREATE TABLE IF NOT EXISTS scores
(
    run_id LowCardinality(String),
    rollout_id String,
    attempt UInt32,
    task_id String,
    group_id String,
    domain LowCardinality(String),
    purpose LowCardinality(String),
    suite LowCardinality(String),
    -- Weighted sum after gates and clip; normalised by the domain's running statistics, which are kept beside it.
    raw Float64,
    normalised Float64,
    components Map(LowCardinality(String), Float64),
    weights Map(LowCardinality(String), Float64),
    normaliser LowCardinality(String),
    normaliser_mean Float64,
    normaliser_std Float64,
    normaliser_count UInt64,
    reward_spec_digest LowCardinality(String),
    flags Array(LowCardinality(String)),
    validity LowCardinality(String),
    invalid_reason String,
    scored_at DateTime64(6, 'UTC') CODEC(Delta, ZSTD(1)),
    _log LowCardinality(String), _topic LowCardinality(String), _partition UInt32, _offset UInt64 CODEC(Delta, ZSTD(1))
)
ENGINE = ReplacingMergeTree(attempt)
ORDER BY (run_id, group_id, rollout_id)
SETTINGS non_replicated_deduplication_window = 10000;

CREATE TABLE IF NOT EXISTS groups
(
    run_id LowCardinality(String),
    group_id String,
    task_id String,
    domain LowCardinality(String),
    group_size UInt32,
    close_reason LowCardinality(String),
    -- Empty: handed to the trainer.
    drop_reason LowCardinality(String),
    advantage_estimator LowCardinality(String),
    reward_mean Float64,
    reward_std Float64,
    closed_at DateTime64(6, 'UTC') CODEC(Delta, ZSTD(1)),
    _log LowCardinality(String), _topic LowCardinality(String), _partition UInt32, _offset UInt64 CODEC(Delta, ZSTD(1))
)
ENGINE = ReplacingMergeTree
ORDER BY (run_id, group_id)
SETTINGS non_replicated_deduplication_window = 10000;

-- One row per sample of a closed group: group_size rows a group (more when a trajectory has several sequences).
CREATE TABLE IF NOT EXISTS group_samples
(
    run_id LowCardinality(String),
    group_id String,
    rollout_id String,
    segment UInt32,
    sample_index UInt32,
    reward Float64,
    advantage Float64,
    policy_version_min UInt64,
    policy_version_max UInt64,
    -- The sample's own reason, else the group's, else empty: to be trained on.
    drop_reason LowCardinality(String)
)
ENGINE = ReplacingMergeTree
ORDER BY (run_id, group_id, rollout_id, segment)
SETTINGS non_replicated_deduplication_window = 10000;

CREATE TABLE IF NOT EXISTS training_steps
(
    run_id LowCardinality(String),
    event_id String,
    step UInt64,
    stage LowCardinality(String),
    policy_version UInt64,
    samples UInt32,
    tokens UInt64,
    metrics Map(LowCardinality(String), Float64),
    trained_at DateTime64(6, 'UTC') CODEC(Delta, ZSTD(1)),
    _log LowCardinality(String), _topic LowCardinality(String), _partition UInt32, _offset UInt64 CODEC(Delta, ZSTD(1))
)
ENGINE = ReplacingMergeTree
ORDER BY (run_id, event_id)
SETTINGS non_replicated_deduplication_window = 10000;

-- What the trainer did with each sample that reached it.
CREATE TABLE IF NOT EXISTS training_samples
(
    run_id LowCardinality(String),
    rollout_id String,
    segment UInt32,
    group_id String,
    event_id String,
    step UInt64,
    -- Trainer version minus the oldest version that sampled it.
    staleness UInt32,
    advantage Float64,
    reward Float64,
    tokens UInt32,
    ratio_mean Float64,
    ratio_max Float64,
    clip_fraction Float64,
    loss Float64,
    -- Empty: trained.
    drop_reason LowCardinality(String)
)
ENGINE = ReplacingMergeTree
ORDER BY (run_id, rollout_id, segment, event_id)
SETTINGS non_replicated_deduplication_window = 10000;

CREATE TABLE IF NOT EXISTS policy_versions
(
    run_id LowCardinality(String),
    policy LowCardinality(String),
    version UInt64,
    step UInt64,
    stage LowCardinality(String),
    uri String,
    digest String,
    size_bytes UInt64,
    -- First version (after the warm start) and last version of the run.
    baseline Bool,
    final Bool,
    published_at DateTime64(6, 'UTC'),
    _log LowCardinality(String), _topic LowCardinality(String), _partition UInt32, _offset UInt64 CODEC(Delta, ZSTD(1))
)
ENGINE = ReplacingMergeTree
ORDER BY (run_id, policy, version)
SETTINGS non_replicated_deduplication_window = 10000;

CREATE TABLE IF NOT EXISTS evaluations
(
    run_id LowCardinality(String),
    suite LowCardinality(String),
    policy_version UInt64,
    -- Empty: the suite's total.
    task_id String,
    domain LowCardinality(String),
    rollout_id String,
    score Float64,
    validity LowCardinality(String),
    invalid_reason String,
    tasks UInt32,
    baseline Bool,
    final Bool,
    evaluated_at DateTime64(6, 'UTC'),
    _log LowCardinality(String), _topic LowCardinality(String), _partition UInt32, _offset UInt64 CODEC(Delta, ZSTD(1))
)
ENGINE = ReplacingMergeTree
ORDER BY (run_id, suite, policy_version, task_id)
SETTINGS non_replicated_deduplication_window = 10000;

CREATE TABLE IF NOT EXISTS curriculum
(
    run_id LowCardinality(String),
    domain LowCardinality(String),
    sampling_weight Float64,
    loss_weight Float64,
    stage LowCardinality(String),
    statistics Map(LowCardinality(String), Float64),
    occurred_at DateTime64(6, 'UTC'),
    _log LowCardinality(String), _topic LowCardinality(String), _partition UInt32, _offset UInt64 CODEC(Delta, ZSTD(1))
)
ENGINE = ReplacingMergeTree
ORDER BY (run_id, domain, occurred_at)
SETTINGS non_replicated_deduplication_window = 10000;

CREATE TABLE IF NOT EXISTS dead_letters
(
    run_id LowCardinality(String),
    event_id String,
    service LowCardinality(String),
    origin_topic String,
    origin_partition Int32,
    origin_offset Int64,
    error_code LowCardinality(String),
    error String,
    hint String,
    -- The samples that it stands for: one rollout, or (rollout_id empty) all of a task; samples 0: unknown or none.
    task_id String,
    rollout_id String,
    samples UInt32,
    key String,
    value String CODEC(ZSTD(6)),
    occurred_at DateTime64(6, 'UTC'),
    _log LowCardinality(String), _topic LowCardinality(String), _partition UInt32, _offset UInt64 CODEC(Delta, ZSTD(1))
)
ENGINE = ReplacingMergeTree
ORDER BY (run_id, event_id)
SETTINGS non_replicated_deduplication_window = 10000;

-- The commit log of the sink: one row per chunk, written after the chunk's rows. The sink goes on at max(last) + 1.
-- broken: records of the chunk that could not be decoded; they are dead letters.
CREATE TABLE IF NOT EXISTS ingested
(
    _log LowCardinality(String),
    _topic LowCardinality(String),
    _partition UInt32,
    first UInt64,
    last UInt64,
    records UInt64,
    broken UInt64,
    at DateTime64(6, 'UTC') DEFAULT now64(6)
)
ENGINE = ReplacingMergeTree(at)
ORDER BY (_log, _topic, _partition, first)
SETTINGS non_replicated_deduplication_window = 10000;
