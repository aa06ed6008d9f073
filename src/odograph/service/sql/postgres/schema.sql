-- API keys and browser sessions in PostgreSQL, schema 2. Keys are a record of who had which access when: a key
-- can be revoked once, and retired once, when another takes its place; it is never changed otherwise or deleted. Only
-- digests of tokens are stored. The tables have a schema of their own, so that a copy of the ledger's schema does not
-- contain them.

CREATE SCHEMA odograph_access;

CREATE TABLE odograph_access.schema_version (version integer NOT NULL);

CREATE TABLE odograph_access.keys (
    number        bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    id            text COLLATE "C" NOT NULL UNIQUE,
    digest        text COLLATE "C" NOT NULL UNIQUE,
    principal     text COLLATE "C" NOT NULL,
    role          text NOT NULL CHECK (role IN ('owner', 'analyst', 'runner', 'auditor')),
    accounts      text COLLATE "C" NOT NULL,
    every_account boolean NOT NULL,
    made          bigint NOT NULL,
    made_by       text COLLATE "C" NOT NULL,
    request       text COLLATE "C" NOT NULL,
    expires       bigint,
    revoked       bigint,
    revoked_by    text COLLATE "C" NOT NULL,
    retires       bigint
);

CREATE UNIQUE INDEX keys_of_requests ON odograph_access.keys (made_by, request) WHERE request <> '';

CREATE TABLE odograph_access.sessions (
    digest text COLLATE "C" NOT NULL PRIMARY KEY,
    key    text COLLATE "C" NOT NULL REFERENCES odograph_access.keys (id),
    csrf   text NOT NULL,
    began  bigint NOT NULL,
    ends   bigint NOT NULL
);

CREATE INDEX sessions_of_keys ON odograph_access.sessions (key);

CREATE FUNCTION odograph_access.refuse() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'a key is revoked once, and never changed otherwise or deleted';
END
$$;

CREATE TRIGGER keys_stay
BEFORE UPDATE OF number, id, digest, principal, role, accounts, every_account, made, made_by, request, expires
OR DELETE OR TRUNCATE ON odograph_access.keys
FOR EACH STATEMENT EXECUTE FUNCTION odograph_access.refuse();

CREATE TRIGGER keys_stay_revoked BEFORE UPDATE ON odograph_access.keys
FOR EACH ROW WHEN (OLD.revoked IS NOT NULL) EXECUTE FUNCTION odograph_access.refuse();

CREATE TRIGGER keys_stay_retired BEFORE UPDATE OF retires ON odograph_access.keys
FOR EACH ROW WHEN (OLD.retires IS NOT NULL) EXECUTE FUNCTION odograph_access.refuse();
