-- Schema 3: the pending reservations and the voided ones have tables, so that neither are searched for.

-- The reservations that are neither committed nor voided, each with its first entry in the account. The triggers below
-- keep it, so it follows from the entries whatever program writes them; `verify` checks that.
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

CREATE TRIGGER entries_pend AFTER INSERT ON entries WHEN NEW.verb = 'reserve'
BEGIN
    INSERT INTO pending (account, reservation, sequence)
    VALUES (NEW.account, substr(
        NEW.legs, 1, min(instr(NEW.legs || ' ', ' '), instr(NEW.legs || '/', '/')) - 1
    ), NEW.sequence)
    ON CONFLICT (account, reservation) DO NOTHING;
END;

CREATE TRIGGER entries_resolve AFTER INSERT ON entries WHEN NEW.verb IN ('commit', 'void')
BEGIN
    DELETE FROM pending WHERE account = NEW.account AND reservation = NEW.key;
END;

CREATE TRIGGER entries_void AFTER INSERT ON entries WHEN NEW.verb = 'void'
BEGIN
    INSERT INTO voids (account, sequence) VALUES (NEW.account, NEW.sequence);
END;
