-- The ledger in PostgreSQL, schema 2. Entries and keys are the record; accounts are derived from them;
-- notes and principals are stored separately and can be erased. Names sort by their bytes, as everywhere else.

CREATE SCHEMA odograph;

CREATE TABLE odograph.schema_version (version integer NOT NULL);

CREATE TABLE odograph.accounts (
    name         text COLLATE "C" NOT NULL PRIMARY KEY,
    parent       text COLLATE "C" REFERENCES odograph.accounts (name) DEFERRABLE,
    successor_of text COLLATE "C" REFERENCES odograph.accounts (name) DEFERRABLE,
    dataset      text COLLATE "C" NOT NULL,
    unit         text NOT NULL,
    neighbours   text NOT NULL,
    sequence     bigint NOT NULL,
    seal         text NOT NULL,
    time         bigint NOT NULL,
    totals       text NOT NULL,
    closed       boolean NOT NULL,
    linked       boolean NOT NULL,
    origin       text NOT NULL
) WITH (fillfactor = 50);

CREATE INDEX accounts_below ON odograph.accounts (parent) WHERE parent IS NOT NULL;
CREATE INDEX accounts_of_dataset ON odograph.accounts (dataset) WHERE dataset <> '';

CREATE TABLE odograph.entries (
    version   integer NOT NULL,
    account   text COLLATE "C" NOT NULL REFERENCES odograph.accounts (name) DEFERRABLE,
    sequence  bigint NOT NULL,
    time      bigint NOT NULL,
    principal text COLLATE "C" NOT NULL,
    verb      text NOT NULL CHECK (verb IN ('open', 'spend', 'reserve', 'commit', 'void', 'refuse', 'close', 'step')),
    legs      text NOT NULL,
    cost      text NOT NULL,
    price     text NOT NULL,
    key       text COLLATE "C" NOT NULL,
    request   text NOT NULL,
    note      text NOT NULL,
    detail    text NOT NULL,
    seal      text NOT NULL,
    PRIMARY KEY (account, sequence)
);

CREATE INDEX entries_that_reserve ON odograph.entries (account, sequence) WHERE verb = 'reserve';

-- The keys that were used, each with the first entry of the request that used it.
CREATE TABLE odograph.keys (
    owner    text COLLATE "C" NOT NULL,
    key      text COLLATE "C" NOT NULL,
    account  text COLLATE "C" NOT NULL,
    sequence bigint NOT NULL,
    PRIMARY KEY (owner, key),
    FOREIGN KEY (account, sequence) REFERENCES odograph.entries (account, sequence) DEFERRABLE
);

CREATE TABLE odograph.notes (
    account  text COLLATE "C" NOT NULL,
    sequence bigint NOT NULL,
    salt     text NOT NULL,
    text     text NOT NULL,
    PRIMARY KEY (account, sequence),
    FOREIGN KEY (account, sequence) REFERENCES odograph.entries (account, sequence) DEFERRABLE
);

CREATE TABLE odograph.principals (
    identity text COLLATE "C" NOT NULL PRIMARY KEY,
    name     text COLLATE "C" NOT NULL UNIQUE
);

CREATE FUNCTION odograph.refuse() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION '% are never changed or deleted', TG_TABLE_NAME;
END
$$;

CREATE TRIGGER entries_stay BEFORE UPDATE OR DELETE OR TRUNCATE ON odograph.entries
FOR EACH STATEMENT EXECUTE FUNCTION odograph.refuse();

CREATE TRIGGER keys_stay BEFORE UPDATE OR DELETE OR TRUNCATE ON odograph.keys
FOR EACH STATEMENT EXECUTE FUNCTION odograph.refuse();

CREATE TRIGGER accounts_stay BEFORE UPDATE OF name, parent, successor_of, dataset, unit, neighbours, origin
OR DELETE OR TRUNCATE ON odograph.accounts
FOR EACH STATEMENT EXECUTE FUNCTION odograph.refuse();
