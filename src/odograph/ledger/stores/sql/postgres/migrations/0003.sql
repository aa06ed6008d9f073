-- Schema 3: the pending reservations and the voided ones have tables, so that neither are searched for.

-- A program that was started before writes on: what it commits before it has to wait here is read below, and what it
-- writes after that, by the triggers. The strongest lock at once, because dropping the index needs it.
LOCK TABLE odograph.entries IN ACCESS EXCLUSIVE MODE;

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

INSERT INTO odograph.pending (account, reservation, sequence)
SELECT account, split_part(split_part(legs, ' ', 1), '/', 1), min(sequence)
FROM odograph.entries
WHERE verb = 'reserve' AND NOT EXISTS (
    SELECT 1 FROM odograph.keys
    WHERE keys.owner = '' AND keys.key = split_part(split_part(entries.legs, ' ', 1), '/', 1) COLLATE "C"
)
GROUP BY account, split_part(split_part(legs, ' ', 1), '/', 1);

INSERT INTO odograph.voids (account, sequence) SELECT account, sequence FROM odograph.entries WHERE verb = 'void';

DROP INDEX odograph.entries_that_reserve;

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

-- Who may read the entries may read what follows from them.
DO $$
DECLARE reader oid;
BEGIN
    FOR reader IN
        SELECT DISTINCT granted.grantee
        FROM pg_class, aclexplode(pg_class.relacl) AS granted
        WHERE pg_class.oid = 'odograph.entries'::regclass AND granted.privilege_type = 'SELECT'
            AND granted.grantee <> pg_class.relowner
    LOOP
        IF reader = 0 THEN
            GRANT SELECT ON odograph.pending, odograph.voids TO PUBLIC;
        ELSE
            EXECUTE format('GRANT SELECT ON odograph.pending, odograph.voids TO %I', pg_get_userbyid(reader));
        END IF;
    END LOOP;
END
$$;
