-- The ledger in SQLite, schema 3. Entries and keys are the record; accounts are derived from them;
-- notes and principals are stored separately and can be erased.

CREATE TABLE accounts (
    name         TEXT NOT NULL PRIMARY KEY,
    parent       TEXT REFERENCES accounts (name),
    successor_of TEXT REFERENCES accounts (name),
    dataset      TEXT NOT NULL,
    unit         TEXT NOT NULL,
    neighbours   TEXT NOT NULL,
    sequence     INTEGER NOT NULL,
    seal         TEXT NOT NULL,
    time         INTEGER NOT NULL,
    totals       TEXT NOT NULL,
    closed       INTEGER NOT NULL CHECK (closed IN (0, 1)),
    linked       INTEGER NOT NULL CHECK (linked IN (0, 1)),
    origin       TEXT NOT NULL
) WITHOUT ROWID;

CREATE INDEX accounts_below ON accounts (parent) WHERE parent IS NOT NULL;
CREATE INDEX accounts_of_dataset ON accounts (dataset) WHERE dataset <> '';

CREATE TABLE entries (
    version   INTEGER NOT NULL,
    account   TEXT NOT NULL REFERENCES accounts (name),
    sequence  INTEGER NOT NULL,
    time      INTEGER NOT NULL,
    principal TEXT NOT NULL,
    verb      TEXT NOT NULL CHECK (verb IN ('open', 'spend', 'reserve', 'commit', 'void', 'refuse', 'close', 'step')),
    legs      TEXT NOT NULL,
    cost      TEXT NOT NULL,
    price     TEXT NOT NULL,
    key       TEXT NOT NULL,
    request   TEXT NOT NULL,
    note      TEXT NOT NULL,
    detail    TEXT NOT NULL,
    seal      TEXT NOT NULL,
    PRIMARY KEY (account, sequence)
) WITHOUT ROWID;

-- The reservations that are neither committed nor voided, each with its first entry in the account. A trigger keeps
-- it, whichever program charges or resolves; `verify` checks that it follows from the entries.
CREATE TABLE pending (
    account     TEXT NOT NULL,
    reservation TEXT NOT NULL,
    sequence    INTEGER NOT NULL,
    PRIMARY KEY (account, reservation)
) WITHOUT ROWID;

CREATE UNIQUE INDEX pending_by_age ON pending (account, sequence);

-- The entries that voided a reservation, to be counted: they are far apart among all the others.
CREATE TABLE voids (
    account  TEXT NOT NULL,
    sequence INTEGER NOT NULL,
    PRIMARY KEY (account, sequence)
) WITHOUT ROWID;

-- The keys that were used, each with the first entry of the request that used it.
CREATE TABLE keys (
    owner    TEXT NOT NULL,
    key      TEXT NOT NULL,
    account  TEXT NOT NULL,
    sequence INTEGER NOT NULL,
    PRIMARY KEY (owner, key),
    FOREIGN KEY (account, sequence) REFERENCES entries (account, sequence)
) WITHOUT ROWID;

CREATE TABLE notes (
    account  TEXT NOT NULL,
    sequence INTEGER NOT NULL,
    salt     TEXT NOT NULL,
    text     TEXT NOT NULL,
    PRIMARY KEY (account, sequence),
    FOREIGN KEY (account, sequence) REFERENCES entries (account, sequence)
) WITHOUT ROWID;

CREATE TABLE principals (
    identity TEXT NOT NULL PRIMARY KEY,
    name     TEXT NOT NULL UNIQUE
) WITHOUT ROWID;

CREATE TRIGGER entries_stay BEFORE UPDATE ON entries
BEGIN SELECT RAISE(ABORT, 'entries are never changed'); END;

CREATE TRIGGER entries_remain BEFORE DELETE ON entries
BEGIN SELECT RAISE(ABORT, 'entries are never deleted'); END;

CREATE TRIGGER keys_stay BEFORE UPDATE ON keys
BEGIN SELECT RAISE(ABORT, 'keys are never changed'); END;

CREATE TRIGGER keys_remain BEFORE DELETE ON keys
BEGIN SELECT RAISE(ABORT, 'keys are never deleted'); END;

CREATE TRIGGER accounts_stay BEFORE UPDATE OF name, parent, successor_of, dataset, unit, neighbours, origin ON accounts
BEGIN SELECT RAISE(ABORT, 'an account never changes its place'); END;

CREATE TRIGGER accounts_remain BEFORE DELETE ON accounts
BEGIN SELECT RAISE(ABORT, 'accounts are never deleted'); END;

-- Every transaction that appends entries moves each account's row to the last of them, once. So what a spend pays for
-- the two tables above does not grow with the number of spends in its transaction.
CREATE TRIGGER accounts_pend AFTER UPDATE OF sequence ON accounts
WHEN EXISTS (
    SELECT 1 FROM entries
    WHERE account = NEW.name AND sequence > OLD.sequence AND verb IN ('reserve', 'commit', 'void')
)
BEGIN
    INSERT INTO pending (account, reservation, sequence)
    SELECT account, substr(legs, 1, min(instr(legs || ' ', ' '), instr(legs || '/', '/')) - 1), sequence
    FROM entries WHERE account = NEW.name AND sequence > OLD.sequence AND verb = 'reserve'
    ORDER BY sequence
    ON CONFLICT (account, reservation) DO NOTHING;
    DELETE FROM pending WHERE account = NEW.name AND reservation IN (
        SELECT key FROM entries WHERE account = NEW.name AND sequence > OLD.sequence AND verb IN ('commit', 'void')
    );
    INSERT INTO voids (account, sequence)
    SELECT account, sequence FROM entries WHERE account = NEW.name AND sequence > OLD.sequence AND verb = 'void';
END;
