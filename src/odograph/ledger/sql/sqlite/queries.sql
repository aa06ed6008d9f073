-- A group in VALUES is repeated where there are more rows: one statement then serves them all.

-- name: some_accounts
SELECT name, parent, successor_of, dataset, unit, neighbours, sequence, seal, time, totals, closed, linked, origin
FROM (VALUES (?)) AS wanted CROSS JOIN accounts ON accounts.name = wanted.column1;

-- name: accounts
SELECT name, parent, successor_of, dataset, unit, neighbours, sequence, seal, time, totals, closed, linked, origin
FROM accounts ORDER BY name;

-- name: tree
WITH RECURSIVE tree (name) AS (
    VALUES (?)
    UNION
    SELECT accounts.name FROM accounts JOIN tree ON accounts.parent = tree.name
)
SELECT name, parent, successor_of, dataset, unit, neighbours, sequence, seal, time, totals, closed, linked, origin
FROM accounts WHERE name IN (SELECT name FROM tree);

-- name: block
SELECT name, parent, successor_of, dataset, unit, neighbours, sequence, seal, time, totals, closed, linked, origin
FROM accounts WHERE dataset = ? AND dataset <> '' LIMIT 1;

-- name: keys
SELECT keys.owner, keys.key, entries.account, entries.sequence, entries.verb, entries.request
FROM (VALUES (?, ?)) AS wanted
CROSS JOIN keys ON keys.owner = wanted.column1 AND keys.key = wanted.column2
JOIN entries ON entries.account = keys.account AND entries.sequence = keys.sequence;

-- name: open_accounts
INSERT INTO accounts (name, parent, successor_of, dataset, unit, neighbours, sequence, seal, time, totals, closed,
     linked, origin)
VALUES (?, nullif(?, ''), nullif(?, ''), ?, ?, ?, ?, ?, ?, ?, ?, ?, ?);

-- name: move_account
UPDATE accounts SET sequence = ?, seal = ?, time = ?, totals = ?, closed = ?, linked = ? WHERE name = ?;

-- name: append_entries
INSERT INTO entries
    (version, account, sequence, time, principal, verb, legs, cost, price, key, request, note, detail, seal)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?);

-- name: remember_keys
INSERT INTO keys (owner, key, account, sequence) VALUES (?, ?, ?, ?);

-- name: keep_notes
INSERT INTO notes (account, sequence, salt, text) VALUES (?, ?, ?, ?);

-- name: entries
SELECT version, account, sequence, time, principal, verb, legs, cost, price, key, request, note, detail, seal
FROM entries WHERE account = ? AND sequence >= ? ORDER BY sequence LIMIT ?;

-- name: pending
SELECT version, account, sequence, time, principal, verb, legs, cost, price, key, request, note, detail, seal
FROM entries
WHERE account = ? AND verb = 'reserve' AND NOT EXISTS (
    SELECT 1 FROM keys WHERE keys.owner = '' AND keys.key = substr(
        entries.legs, 1, min(instr(entries.legs || ' ', ' '), instr(entries.legs || '/', '/')) - 1
    )
)
ORDER BY sequence;

-- name: voids
SELECT count(*)
FROM entries
JOIN keys ON keys.owner = '' AND keys.key = substr(
    entries.legs, 1, min(instr(entries.legs || ' ', ' '), instr(entries.legs || '/', '/')) - 1
)
JOIN entries AS done ON done.account = keys.account AND done.sequence = keys.sequence AND done.verb = 'void'
WHERE entries.account = ? AND entries.verb = 'reserve';

-- name: notes
SELECT account, sequence, salt, text FROM notes WHERE account = ? AND sequence >= ? AND sequence < ?;

-- name: all_notes
SELECT account, sequence, salt, text FROM notes ORDER BY account, sequence;

-- name: records
SELECT
    entries.version, entries.account, entries.sequence, entries.time, entries.principal, entries.verb, entries.legs,
    entries.cost, entries.price, entries.key, entries.request, entries.note, entries.detail, entries.seal,
    keys.account, keys.sequence
FROM entries LEFT JOIN keys
    ON keys.owner = CASE WHEN entries.verb IN ('commit', 'void') THEN '' ELSE entries.principal END
    AND keys.key = entries.key
ORDER BY entries.account, entries.sequence;

-- name: sizes
SELECT (SELECT count(*) FROM entries), (SELECT count(*) FROM keys);

-- name: principal
SELECT identity FROM principals WHERE name = ?;

-- name: add_principal
INSERT INTO principals (identity, name) VALUES (?, ?) ON CONFLICT (name) DO NOTHING;

-- name: forget_principals
DELETE FROM principals;

-- name: principals
SELECT identity, name FROM principals;

-- name: erase_note
DELETE FROM notes WHERE account = ? AND sequence = ?;

-- name: erase_principal
DELETE FROM principals WHERE name = ?;
