-- The ledger in PostgreSQL, schema 3. Entries and keys are the record; accounts are derived from them;
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

-- The reservations that are neither committed nor voided, each with its first entry in the account. The triggers below
-- keep it, so it follows from the entries whatever program writes them; `verify` checks that.
CREATE TABLE odograph.pending (
    account     text COLLATE "C" NOT NULL,
    reservation text COLLATE "C" NOT NULL,
    sequence    bigint NOT NULL,
    PRIMARY KEY (account, reservation)
);

CREATE UNIQUE INDEX pending_by_age ON odograph.pending (account, sequence);

-- The entries that voided a reservation, to be counted: they are far apart among all the others.
CREATE TABLE odograph.voids (
    account  text COLLATE "C" NOT NULL,
    sequence bigint NOT NULL,
    PRIMARY KEY (account, sequence)
);

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

-- With the rights of the owner: a role that may append entries needs none on these tables.
CREATE FUNCTION odograph.pend() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog AS $$
BEGIN
    IF NEW.verb = 'reserve' THEN
        INSERT INTO odograph.pending (account, reservation, sequence)
        VALUES (NEW.account, split_part(split_part(NEW.legs, ' ', 1), '/', 1), NEW.sequence)
        ON CONFLICT (account, reservation) DO NOTHING;
    ELSE
        DELETE FROM odograph.pending WHERE account = NEW.account AND reservation = NEW.key;
    END IF;
    IF NEW.verb = 'void' THEN
        INSERT INTO odograph.voids (account, sequence) VALUES (NEW.account, NEW.sequence);
    END IF;
    RETURN NULL;
END
$$;

CREATE TRIGGER entries_pend AFTER INSERT ON odograph.entries
FOR EACH ROW WHEN (NEW.verb IN ('reserve', 'commit', 'void')) EXECUTE FUNCTION odograph.pend();
