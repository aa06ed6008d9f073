-- name: any_key
SELECT id FROM keys LIMIT 1;

-- name: key_of_request
SELECT id FROM keys WHERE made_by = ? AND request = ? AND request <> '';

-- name: add_key
INSERT INTO keys
    (id, digest, principal, role, accounts, every_account, made, made_by, expires, revoked, revoked_by, request)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?);

-- name: key_of_digest
SELECT
    id, digest, principal, role, accounts, every_account, made, made_by,
    coalesce(min(expires, retires), expires, retires), revoked, revoked_by
FROM keys WHERE digest = ?;

-- name: key
SELECT
    id, digest, principal, role, accounts, every_account, made, made_by,
    coalesce(min(expires, retires), expires, retires), revoked, revoked_by
FROM keys WHERE id = ?;

-- name: keys
SELECT
    id, digest, principal, role, accounts, every_account, made, made_by,
    coalesce(min(expires, retires), expires, retires), revoked, revoked_by
FROM keys
WHERE number < coalesce((SELECT number FROM keys WHERE id = ?), 9223372036854775807)
ORDER BY number DESC LIMIT ?;

-- name: other_owners
-- A key that was rotated ends soon, and cannot be rotated again: it is no owner that is left.
SELECT id FROM keys
WHERE role = 'owner' AND id <> ? AND revoked IS NULL AND retires IS NULL
    AND ifnull(expires, 9223372036854775807) > ?
LIMIT 1;

-- name: revoke
UPDATE keys SET revoked = ?, revoked_by = ? WHERE id = ?;

-- name: retired
SELECT id FROM keys WHERE id = ? AND retires IS NOT NULL;

-- name: retire
UPDATE keys SET retires = ? WHERE id = ?;

-- name: end_sessions_of_key
DELETE FROM sessions WHERE key = ?;

-- name: end_old_sessions
DELETE FROM sessions WHERE ends <= ?;

-- name: end_session
DELETE FROM sessions WHERE digest = ?;

-- name: add_session
INSERT INTO sessions (digest, key, csrf, began, ends) VALUES (?, ?, ?, ?, ?);

-- name: session
SELECT
    sessions.digest, sessions.key, sessions.csrf, sessions.began, sessions.ends,
    keys.id, keys.digest, principal, role, accounts, every_account, made, made_by,
    coalesce(min(expires, retires), expires, retires), revoked, revoked_by
FROM sessions JOIN keys ON keys.id = sessions.key
WHERE sessions.digest = ?;
