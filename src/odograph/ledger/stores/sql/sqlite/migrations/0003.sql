-- Schema 3: the pending reservations and the voided ones have tables, so that neither are searched for.

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

INSERT INTO pending (account, reservation, sequence)
SELECT account, substr(legs, 1, min(instr(legs || ' ', ' '), instr(legs || '/', '/')) - 1) AS reservation, min(sequence)
FROM entries INDEXED BY entries_that_reserve
WHERE verb = 'reserve' AND NOT EXISTS (
    SELECT 1 FROM keys WHERE keys.owner = '' AND keys.key = substr(
        entries.legs, 1, min(instr(entries.legs || ' ', ' '), instr(entries.legs || '/', '/')) - 1
    )
)
GROUP BY account, reservation;

INSERT INTO voids (account, sequence) SELECT account, sequence FROM entries WHERE verb = 'void';

DROP INDEX entries_that_reserve;

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
