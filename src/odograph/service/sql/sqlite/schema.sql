-- API keys and browser sessions in SQLite, schema 2. Keys are a record of who had which access when: a key can be
-- revoked once, and retired once, when another takes its place; it is never changed otherwise or deleted. Only digests
-- of tokens are stored.

CREATE TABLE keys (
    number        INTEGER PRIMARY KEY AUTOINCREMENT,
    id            TEXT NOT NULL UNIQUE,
    digest        TEXT NOT NULL UNIQUE,
    principal     TEXT NOT NULL,
    role          TEXT NOT NULL CHECK (role IN ('owner', 'analyst', 'runner', 'auditor')),
    accounts      TEXT NOT NULL,
    every_account INTEGER NOT NULL CHECK (every_account IN (0, 1)),
    made          INTEGER NOT NULL,
    made_by       TEXT NOT NULL,
    request       TEXT NOT NULL,
    expires       INTEGER,
    revoked       INTEGER,
    revoked_by    TEXT NOT NULL,
    retires       INTEGER
);

CREATE UNIQUE INDEX keys_of_requests ON keys (made_by, request) WHERE request <> '';

CREATE TABLE sessions (
    digest TEXT NOT NULL PRIMARY KEY,
    key    TEXT NOT NULL REFERENCES keys (id),
    csrf   TEXT NOT NULL,
    began  INTEGER NOT NULL,
    ends   INTEGER NOT NULL
) WITHOUT ROWID;

CREATE INDEX sessions_of_keys ON sessions (key);

CREATE TRIGGER keys_stay
BEFORE UPDATE OF number, id, digest, principal, role, accounts, every_account, made, made_by, request, expires ON keys
BEGIN SELECT RAISE(ABORT, 'a key never changes'); END;

CREATE TRIGGER keys_stay_revoked BEFORE UPDATE ON keys WHEN OLD.revoked IS NOT NULL
BEGIN SELECT RAISE(ABORT, 'a revoked key stays revoked'); END;

CREATE TRIGGER keys_stay_retired BEFORE UPDATE OF retires ON keys WHEN OLD.retires IS NOT NULL
BEGIN SELECT RAISE(ABORT, 'a key is retired once'); END;

CREATE TRIGGER keys_remain BEFORE DELETE ON keys
BEGIN SELECT RAISE(ABORT, 'keys are never deleted'); END;
