-- name: begin
BEGIN;

-- name: settings
SELECT
    set_config('synchronous_commit', 'on', true),
    set_config('lock_timeout', %s, true),
    set_config('idle_in_transaction_session_timeout', %s, true);

-- name: server_settings
SELECT name, setting FROM pg_settings WHERE name IN (
    'default_transaction_isolation', 'default_transaction_read_only', 'fsync', 'full_page_writes', 'server_version',
    'synchronous_commit'
)
UNION ALL SELECT 'in_recovery', pg_is_in_recovery()::text
UNION ALL SELECT 'clock', (extract(epoch FROM clock_timestamp()) * 1000000)::bigint::text;

-- name: one_at_a_time
SELECT pg_advisory_xact_lock(7310046181401);

-- name: one_at_a_time_if_free
SELECT pg_try_advisory_xact_lock(7310046181401);

-- name: lock
SELECT name, parent, successor_of, dataset, unit, neighbours, sequence, seal, time, totals, closed, linked, origin
FROM odograph.accounts
WHERE name = ANY (%s::text[])
ORDER BY name
FOR UPDATE;

-- name: lock_trees
WITH RECURSIVE tree (name) AS (
    SELECT unnest(%s::text[]) COLLATE "C"
    UNION
    SELECT accounts.name FROM odograph.accounts JOIN tree ON accounts.parent = tree.name
)
SELECT name, parent, successor_of, dataset, unit, neighbours, sequence, seal, time, totals, closed, linked, origin
FROM odograph.accounts
WHERE name = ANY (%s::text[]) OR name IN (SELECT name FROM tree)
ORDER BY name
FOR UPDATE;

-- name: blocks
SELECT DISTINCT ON (dataset)
    name, parent, successor_of, dataset, unit, neighbours, sequence, seal, time, totals, closed, linked, origin
FROM odograph.accounts
WHERE dataset = ANY (%s::text[]) AND dataset <> ''
ORDER BY dataset, name;

-- name: keys
-- The wanted keys that their owners have used; and a row without an account if names were erased, for `erased_keys`.
-- Every charge asks this, and it is planned each time: it is kept simple.
WITH wanted (owner, key) AS (SELECT row ->> 0, row ->> 1 FROM jsonb_array_elements(%s::jsonb) AS wanted (row))
SELECT keys.owner, keys.key, entries.account, entries.sequence, entries.verb, entries.request
FROM wanted
JOIN odograph.keys ON keys.owner = wanted.owner AND keys.key = wanted.key
JOIN odograph.entries ON entries.account = keys.account AND entries.sequence = keys.sequence
UNION ALL
SELECT '', '', '', 0, '', '' WHERE EXISTS (SELECT FROM odograph.principals WHERE name < ' ');

-- name: erased_keys
-- Of wanted keys that their owners have not used, those that a principal with an erased name has used, without the
-- request. For an owner whose own name was erased (a running program may still have its identity), those that any
-- principal has used: one of them may be the same person under a new identity.
WITH wanted (owner, key) AS (SELECT row ->> 0, row ->> 1 FROM jsonb_array_elements(%s::jsonb) AS wanted (row))
SELECT wanted.owner, wanted.key, entries.account, entries.sequence, entries.verb, ''
FROM odograph.principals
CROSS JOIN wanted
CROSS JOIN LATERAL (
    SELECT keys.account, keys.sequence FROM odograph.keys
    WHERE keys.owner = principals.identity AND keys.key = wanted.key
    LIMIT 1
) AS used
JOIN odograph.entries ON entries.account = used.account AND entries.sequence = used.sequence
WHERE principals.name < ' ' AND wanted.owner <> ''
    AND NOT EXISTS (SELECT FROM odograph.keys WHERE keys.owner = wanted.owner AND keys.key = wanted.key)
UNION ALL
SELECT wanted.owner, wanted.key, entries.account, entries.sequence, entries.verb, ''
FROM wanted
JOIN odograph.principals AS erased ON erased.identity = wanted.owner AND erased.name < ' '
CROSS JOIN odograph.principals AS other
JOIN odograph.keys ON keys.owner = other.identity AND keys.key = wanted.key
JOIN odograph.entries ON entries.account = keys.account AND entries.sequence = keys.sequence
WHERE NOT EXISTS (SELECT FROM odograph.keys AS own WHERE own.owner = wanted.owner AND own.key = wanted.key);

-- name: now
SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint;

-- name: open_accounts
INSERT INTO odograph.accounts
    (name, parent, successor_of, dataset, unit, neighbours, sequence, seal, time, totals, closed, linked,
     origin)
SELECT
    row ->> 0, nullif(row ->> 1, ''), nullif(row ->> 2, ''), row ->> 3, row ->> 4, row ->> 5,
    (row ->> 6)::bigint, row ->> 7, (row ->> 8)::bigint, row ->> 9, (row ->> 10)::boolean,
    (row ->> 11)::boolean, row ->> 12
FROM jsonb_array_elements(%s::jsonb) AS opened (row);

-- name: store
-- The entries, accounts and keys of a group in one statement: each further one would be sent, planned and answered.
WITH appended AS (
    INSERT INTO odograph.entries
        (version, account, sequence, time, principal, verb, legs, cost, price, key, request, note, detail, seal)
    SELECT
        (row ->> 0)::integer, row ->> 1, (row ->> 2)::bigint, (row ->> 3)::bigint, row ->> 4, row ->> 5, row ->> 6,
        row ->> 7, row ->> 8, row ->> 9, row ->> 10, row ->> 11, row ->> 12, row ->> 13
    FROM jsonb_array_elements(%s::jsonb) AS appended (row)
), moved AS (
    UPDATE odograph.accounts
    SET sequence = (row ->> 1)::bigint, seal = row ->> 2, time = (row ->> 3)::bigint, totals = row ->> 4,
        closed = (row ->> 5)::boolean, linked = (row ->> 6)::boolean
    FROM jsonb_array_elements(%s::jsonb) AS moved (row)
    WHERE accounts.name = row ->> 0
)
INSERT INTO odograph.keys (owner, key, account, sequence)
SELECT row ->> 0, row ->> 1, row ->> 2, (row ->> 3)::bigint
FROM jsonb_array_elements(%s::jsonb) AS remembered (row);

-- name: keep_notes
INSERT INTO odograph.notes (account, sequence, salt, text)
SELECT row ->> 0, (row ->> 1)::bigint, row ->> 2, row ->> 3
FROM jsonb_array_elements(%s::jsonb) AS kept (row);

-- name: commit
COMMIT;

-- name: defer
SET CONSTRAINTS ALL DEFERRED;

-- name: some_accounts
SELECT name, parent, successor_of, dataset, unit, neighbours, sequence, seal, time, totals, closed, linked, origin
FROM odograph.accounts WHERE name = ANY (%s::text[]) ORDER BY name;

-- name: accounts
SELECT name, parent, successor_of, dataset, unit, neighbours, sequence, seal, time, totals, closed, linked, origin
FROM odograph.accounts ORDER BY name;

-- name: entries
SELECT version, account, sequence, time, principal, verb, legs, cost, price, key, request, note, detail, seal
FROM odograph.entries WHERE account = %s AND sequence >= %s ORDER BY sequence LIMIT %s;

-- name: openings
SELECT version, account, sequence, time, principal, verb, legs, cost, price, key, request, note, detail, seal
FROM odograph.entries WHERE account = ANY (%s::text[]) AND sequence = 0;

-- name: pending
SELECT
    entries.version, entries.account, entries.sequence, entries.time, entries.principal, entries.verb, entries.legs,
    entries.cost, entries.price, entries.key, entries.request, entries.note, entries.detail, entries.seal
FROM odograph.pending
JOIN odograph.entries ON entries.account = pending.account AND entries.sequence = pending.sequence
WHERE pending.account = %s AND pending.sequence >= %s
ORDER BY pending.sequence LIMIT %s;

-- name: pending_counts
SELECT account, count(*) FROM odograph.pending GROUP BY account;

-- name: pending_count
SELECT count(*) FROM odograph.pending WHERE account = %s;

-- name: voids
SELECT count(*) FROM odograph.voids WHERE account = %s;

-- name: void_counts
SELECT account, count(*) FROM odograph.voids GROUP BY account;

-- name: all_pending
SELECT account, reservation, sequence FROM odograph.pending;

-- name: notes
SELECT account, sequence, salt, text FROM odograph.notes WHERE account = %s AND sequence >= %s AND sequence < %s;

-- name: all_notes
SELECT account, sequence, salt, text FROM odograph.notes ORDER BY account, sequence;

-- name: records
SELECT
    entries.version, entries.account, entries.sequence, entries.time, entries.principal, entries.verb, entries.legs,
    entries.cost, entries.price, entries.key, entries.request, entries.note, entries.detail, entries.seal,
    keys.account, keys.sequence
FROM odograph.entries LEFT JOIN odograph.keys
    ON keys.owner = CASE WHEN entries.verb IN ('commit', 'void') THEN '' ELSE entries.principal END
    AND keys.key = entries.key
ORDER BY entries.account, entries.sequence;

-- name: sizes
SELECT (SELECT count(*) FROM odograph.entries), (SELECT count(*) FROM odograph.keys);

-- name: principal
SELECT identity FROM odograph.principals WHERE name = %s;

-- name: add_principal
INSERT INTO odograph.principals (identity, name) VALUES (%s, %s) ON CONFLICT (name) DO NOTHING;

-- name: forget_principals
DELETE FROM odograph.principals;

-- name: principals
SELECT identity, name FROM odograph.principals WHERE name >= ' ';

-- name: erase_note
DELETE FROM odograph.notes WHERE account = %s AND sequence = %s;

-- The identity stays, as its keys do. Its name becomes a string that no name can be: it sorts before the space, which
-- is the first printable character.

-- name: erase_principal
WITH erased AS (DELETE FROM odograph.principals WHERE name = %s RETURNING identity)
INSERT INTO odograph.principals (identity, name) SELECT identity, chr(10) || identity FROM erased;

-- name: mark_erased
INSERT INTO odograph.principals (identity, name)
SELECT DISTINCT owner, chr(10) || owner FROM odograph.keys
WHERE owner <> '' AND NOT EXISTS (SELECT FROM odograph.principals WHERE identity = owner);

-- name: ledger_there
SELECT to_regclass('odograph.schema_version') IS NOT NULL;

-- name: version
SELECT version FROM odograph.schema_version;

-- name: probe
-- Several clients may do this at once; it does not wait for locks of others.
SELECT version FROM odograph.schema_version FOR SHARE SKIP LOCKED;

-- name: set_version
INSERT INTO odograph.schema_version (version) VALUES (%s);

-- name: clear_version
DELETE FROM odograph.schema_version;

-- name: snapshot
BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY;
