-- name: begin
BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE;

-- name: settings
SELECT
    set_config('synchronous_commit', 'on', true),
    set_config('lock_timeout', %s, true),
    set_config('idle_in_transaction_session_timeout', '30s', true);

-- name: one_at_a_time
SELECT pg_advisory_xact_lock(7310046181402);

-- name: there
SELECT to_regclass('odograph_access.schema_version') IS NOT NULL;

-- name: version
SELECT version FROM odograph_access.schema_version;

-- name: set_version
INSERT INTO odograph_access.schema_version (version) VALUES (%s);

-- name: raise_version
UPDATE odograph_access.schema_version SET version = %s;

-- name: any_key
SELECT id FROM odograph_access.keys LIMIT 1;

-- name: key_of_request
SELECT id FROM odograph_access.keys WHERE made_by = %s AND request = %s AND request <> '';

-- name: add_key
INSERT INTO odograph_access.keys
    (id, digest, principal, role, accounts, every_account, made, made_by, expires, revoked, revoked_by, request)
VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s);

-- name: key_of_digest
SELECT
    id, digest, principal, role, accounts, every_account, made, made_by,
    least(expires, retires), revoked, revoked_by
FROM odograph_access.keys WHERE digest = %s;

-- name: key
SELECT
    id, digest, principal, role, accounts, every_account, made, made_by,
    least(expires, retires), revoked, revoked_by
FROM odograph_access.keys WHERE id = %s;

-- name: keys
SELECT
    id, digest, principal, role, accounts, every_account, made, made_by,
    least(expires, retires), revoked, revoked_by
FROM odograph_access.keys
WHERE number < coalesce((SELECT number FROM odograph_access.keys WHERE id = %s), 9223372036854775807)
ORDER BY number DESC LIMIT %s;

-- name: other_owners
-- A key that was rotated ends soon, and cannot be rotated again: it is no owner that is left.
SELECT id FROM odograph_access.keys
WHERE role = 'owner' AND id <> %s AND revoked IS NULL AND retires IS NULL
    AND coalesce(expires, 9223372036854775807) > %s
LIMIT 1;

-- name: revoke
UPDATE odograph_access.keys SET revoked = %s, revoked_by = %s WHERE id = %s;

-- name: retired
SELECT id FROM odograph_access.keys WHERE id = %s AND retires IS NOT NULL;

-- name: retire
UPDATE odograph_access.keys SET retires = %s WHERE id = %s;

-- name: end_sessions_of_key
DELETE FROM odograph_access.sessions WHERE key = %s;

-- name: end_old_sessions
DELETE FROM odograph_access.sessions WHERE ends <= %s;

-- name: end_session
DELETE FROM odograph_access.sessions WHERE digest = %s;

-- name: add_session
INSERT INTO odograph_access.sessions (digest, key, csrf, began, ends) VALUES (%s, %s, %s, %s, %s);

-- name: session
SELECT
    sessions.digest, sessions.key, sessions.csrf, sessions.began, sessions.ends,
    keys.id, keys.digest, principal, role, accounts, every_account, made, made_by,
    least(expires, retires), revoked, revoked_by
FROM odograph_access.sessions JOIN odograph_access.keys ON keys.id = sessions.key
WHERE sessions.digest = %s;
