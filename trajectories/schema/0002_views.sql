-- Deduplication lives here, once: FINAL on small columns.

-- Every scored rollout with what it was and what it got, by the attempt that was scored. INVALID ones have reward NULL: they are never 0.
CREATE VIEW IF NOT EXISTS trajectories_scored AS
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
    ON s.run_id = t.run_id AND s.group_id = t.group_id AND s.rollout_id = t.rollout_id AND s.attempt = t.attempt;

CREATE VIEW IF NOT EXISTS reward_by_version AS
SELECT run_id, domain, policy_version_max AS policy_version, count() AS rollouts, avg(reward) AS reward,
       avg(tool_calls) AS tool_calls, avg(sampled_tokens) AS sampled_tokens
FROM trajectories_scored
WHERE purpose = 'train'
GROUP BY run_id, domain, policy_version;

-- Every training sample that was produced, with its final state, as trajectories/accounting.py counts them: trained, else
-- dropped by the trainer, else dead-lettered, else dropped with its group, else in flight. step and staleness: of the trainer's
-- record of it, NULL when there is none.
CREATE VIEW IF NOT EXISTS samples AS
SELECT
    p.run_id AS run_id, p.task_id AS task_id, p.group_id AS group_id, p.domain AS domain, p.sample_index AS sample_index,
    p.rollout_id AS rollout_id,
    multiIf(
        u.trained > 0, 'trained',
        u.refused != '', 'dropped',
        d.letters > 0, 'dead_lettered',
        g.drop_reason != '', 'dropped',
        'in_flight') AS state,
    multiIf(state != 'dropped', '', u.refused != '', u.refused, g.drop_reason) AS drop_reason,
    if(u.uses > 0, u.step, NULL) AS step, if(u.uses > 0, u.staleness, NULL) AS staleness
FROM
(
    SELECT run_id, task_id, group_id, domain, rollout_id, toUInt32(number - 1) AS sample_index
    FROM tasks FINAL ARRAY JOIN rollout_ids AS rollout_id, arrayEnumerate(rollout_ids) AS number
    WHERE purpose = 'train'
) AS p
LEFT JOIN
(
    SELECT run_id, rollout_id, min(s.drop_reason) AS drop_reason
    FROM group_samples AS s FINAL GROUP BY run_id, rollout_id
) AS g ON g.run_id = p.run_id AND g.rollout_id = p.rollout_id
LEFT JOIN
(
    SELECT run_id, rollout_id, count() AS uses, countIf(s.drop_reason = '') AS trained, max(s.drop_reason) AS refused,
           min(s.step) AS step, max(s.staleness) AS staleness
    FROM training_samples AS s FINAL GROUP BY run_id, rollout_id
) AS u ON u.run_id = p.run_id AND u.rollout_id = p.rollout_id
LEFT JOIN
(
    SELECT run_id, rollout_id, count() AS letters FROM
    (
        SELECT run_id, rollout_id FROM dead_letters WHERE samples > 0 AND rollout_id != ''
        UNION ALL
        SELECT run_id, arrayJoin(rollout_ids) AS rollout_id FROM tasks FINAL
        WHERE (run_id, task_id) IN (SELECT run_id, task_id FROM dead_letters WHERE samples > 0 AND rollout_id = '')
        UNION ALL
        -- A group that the trainer could not read is named by its key.
        SELECT run_id, arrayJoin(rollout_ids) AS rollout_id FROM tasks FINAL
        WHERE (run_id, group_id) IN
            (SELECT run_id, key FROM dead_letters WHERE service = 'trainer' AND origin_topic = 'replay')
    )
    GROUP BY run_id, rollout_id
) AS d ON d.run_id = p.run_id AND d.rollout_id = p.rollout_id;

-- The books by run; `rollstream audit` looks for contradictions as well.
CREATE VIEW IF NOT EXISTS books AS
SELECT run_id, count() AS produced, countIf(state = 'trained') AS trained,
       sumMapIf(map(drop_reason, 1), state = 'dropped') AS dropped,
       countIf(state = 'dead_lettered') AS dead_lettered, countIf(state = 'in_flight') AS in_flight
FROM samples
GROUP BY run_id;
