-- Deduplication lives here, once: FINAL on small columns.

-- Every scored rollout with what it was and what it got. INVALID ones have reward NULL: they are never 0.
CREATE VIEW trajectories_scored AS
SELECT
    t.run_id AS run_id, t.rollout_id AS rollout_id, t.attempt AS attempt, t.task_id AS task_id, t.group_id AS group_id,
    t.sample_index AS sample_index, t.domain AS domain, t.purpose AS purpose, t.suite AS suite,
    t.status AS status, t.reason AS reason, t.turns AS turns, t.tool_calls AS tool_calls, t.tool_failures AS tool_failures,
    t.tokens AS tokens, t.sampled_tokens AS sampled_tokens,
    t.policy_version_min AS policy_version_min, t.policy_version_max AS policy_version_max,
    t.generate_s AS generate_s, t.tool_s AS tool_s, t.started_at AS started_at, t.finished_at AS finished_at,
    if(s.validity = 'valid', s.raw, NULL) AS reward,
    if(s.validity = 'valid', s.normalised, NULL) AS normalised,
    s.validity AS validity, s.invalid_reason AS invalid_reason, s.components AS components, s.flags AS flags
FROM trajectories AS t FINAL
INNER JOIN (SELECT * FROM scores FINAL) AS s
    ON s.run_id = t.run_id AND s.group_id = t.group_id AND s.rollout_id = t.rollout_id;

CREATE VIEW reward_by_version AS
SELECT run_id, domain, policy_version_max AS policy_version, count() AS rollouts, avg(reward) AS reward,
       avg(tool_calls) AS tool_calls, avg(sampled_tokens) AS sampled_tokens
FROM trajectories_scored
WHERE purpose = 'train'
GROUP BY run_id, domain, policy_version;

-- Every training sample that was produced, with its final state. A sample is task x sample index.
CREATE VIEW samples AS
SELECT
    p.run_id AS run_id, p.task_id AS task_id, p.group_id AS group_id, p.domain AS domain, p.sample_index AS sample_index,
    g.rollout_id AS rollout_id,
    multiIf(
        t.trained > 0, 'trained',
        d.letters > 0 OR g.dead > 0, 'dead_lettered',
        t.dropped != '' OR g.drop_reason != '', 'dropped',
        'in_flight') AS state,
    multiIf(state = 'dropped' AND t.dropped != '', t.dropped, state = 'dropped', g.drop_reason, '') AS drop_reason,
    t.step AS step, t.staleness AS staleness
FROM
(
    SELECT run_id, task_id, group_id, domain, arrayJoin(range(group_size)) AS sample_index
    FROM tasks FINAL WHERE purpose = 'train'
) AS p
LEFT JOIN
(
    SELECT s.run_id AS run_id, s.group_id AS group_id, s.sample_index AS sample_index, any(s.rollout_id) AS rollout_id,
           max(s.drop_reason) AS drop_reason,
           countIf(s.rollout_id IN (SELECT rollout_id FROM dead_letters WHERE rollout_id != '')) AS dead
    FROM group_samples AS s FINAL GROUP BY run_id, group_id, sample_index
) AS g ON g.run_id = p.run_id AND g.group_id = p.group_id AND g.sample_index = p.sample_index
LEFT JOIN
(
    SELECT u.run_id AS run_id, u.group_id AS group_id, u.rollout_id AS rollout_id,
           countIf(u.drop_reason = '') AS trained, max(u.drop_reason) AS dropped,
           min(u.step) AS step, max(u.staleness) AS staleness
    FROM training_samples AS u FINAL GROUP BY run_id, group_id, rollout_id
) AS t ON t.run_id = p.run_id AND t.group_id = p.group_id AND t.rollout_id = g.rollout_id
LEFT JOIN
(
    SELECT run_id, task_id, count() AS letters FROM dead_letters FINAL
    WHERE task_id != '' AND rollout_id = '' AND samples > 0 GROUP BY run_id, task_id
) AS d ON d.run_id = p.run_id AND d.task_id = p.task_id;
