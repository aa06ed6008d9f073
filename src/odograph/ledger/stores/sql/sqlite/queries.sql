-- The group after VALUES is repeated for several rows, so that one statement serves them all.

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
-- The wanted keys that their owners have used; and a row without an account if names were erased, for `erased_keys`.
SELECT keys.owner, keys.key, entries.account, entries.sequence, entries.verb, entries.request
FROM (VALUES (?, ?)) AS wanted
CROSS JOIN keys ON keys.owner = wanted.column1 AND keys.key = wanted.column2
JOIN entries ON entries.account = keys.account AND entries.sequence = keys.sequence
UNION ALL
SELECT '', '', '', 0, '', '' WHERE EXISTS (SELECT 1 FROM principals WHERE name < ' ');

-- name: erased_keys
-- Of wanted keys that their owners have not used, those that a principal with an erased name has used, without the
-- request. For an owner whose own name was erased (a running program may still have its identity), those that any
-- principal has used: one of them may be the same person under a new identity.
WITH wanted (owner, key) AS (VALUES (?, ?))
SELECT wanted.owner, wanted.key, entries.account, entries.sequence, entries.verb, ''
FROM principals
CROSS JOIN wanted ON wanted.owner <> ''
CROSS JOIN keys ON keys.owner = principals.identity AND keys.key = wanted.key
JOIN entries ON entries.account = keys.account AND entries.sequence = keys.sequence
WHERE principals.name < ' '
    AND NOT EXISTS (SELECT 1 FROM keys AS own WHERE own.owner = wanted.owner AND own.key = wanted.key)
UNION ALL
SELECT wanted.owner, wanted.key, entries.account, entries.sequence, entries.verb, ''
FROM wanted
CROSS JOIN principals AS erased ON erased.identity = wanted.owner AND erased.name < ' '
CROSS JOIN principals AS other
CROSS JOIN keys ON keys.owner = other.identity AND keys.key = wanted.key
JOIN entries ON entries.account = keys.account AND entries.sequence = keys.sequence
WHERE NOT EXISTS (SELECT 1 FROM keys AS own WHERE own.owner = wanted.owner AND own.key = wanted.key);

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

-- name: openings
SELECT version, account, sequence, time, principal, verb, legs, cost, price, key, request, note, detail, seal
FROM (VALUES (?)) AS wanted CROSS JOIN entries ON entries.account = wanted.column1 AND entries.sequence = 0;

-- name: pending
SELECT
    entries.version, entries.account, entries.sequence, entries.time, entries.principal, entries.verb, entries.legs,
    entries.cost, entries.price, entries.key, entries.request, entries.note, entries.detail, entries.seal
FROM pending CROSS JOIN entries ON entries.account = pending.account AND entries.sequence = pending.sequence
WHERE pending.account = ? AND pending.sequence >= ?
ORDER BY pending.sequence LIMIT ?;

-- name: pending_counts
SELECT account, count(*) FROM pending GROUP BY account;

-- name: pending_count
SELECT count(*) FROM pending WHERE account = ?;

-- name: voids
SELECT count(*) FROM voids WHERE account = ?;

-- name: notes
SELECT account, sequence, salt, text FROM notes WHERE account = ? AND sequence >= ? AND sequence < ?;

-- name: all_notes
SELECT account, sequence, salt, text FROM notes WHERE (account, sequence) > (?, ?) ORDER BY account, sequence LIMIT ?;

-- name: records
SELECT
    entries.version, entries.account, entries.sequence, entries.time, entries.principal, entries.verb, entries.legs,
    entries.cost, entries.price, entries.key, entries.request, entries.note, entries.detail, entries.seal,
    keys.account, keys.sequence
FROM entries LEFT JOIN keys
    ON keys.owner = CASE WHEN entries.verb IN ('commit', 'void') THEN '' ELSE entries.principal END
    AND keys.key = entries.key
WHERE entries.account = ? AND entries.sequence BETWEEN ? AND ?
ORDER BY entries.sequence LIMIT ?;

-- name: void_counts
SELECT account, count(*) FROM voids GROUP BY account;

-- name: fill_pending
-- For a copy, whose accounts are stored at the last entry already, so that the trigger has nothing to move. A file that
-- a development version made has other triggers, which have listed them.
INSERT INTO pending (account, reservation, sequence)
SELECT account, substr(legs, 1, min(instr(legs || ' ', ' '), instr(legs || '/', '/')) - 1) AS reservation, min(sequence)
FROM entries
WHERE verb = 'reserve' AND NOT EXISTS (
    SELECT 1 FROM keys WHERE keys.owner = '' AND keys.key = substr(
        entries.legs, 1, min(instr(entries.legs || ' ', ' '), instr(entries.legs || '/', '/')) - 1
    )
)
GROUP BY account, reservation
ON CONFLICT DO NOTHING;

-- name: fill_voids
INSERT INTO voids (account, sequence) SELECT account, sequence FROM entries WHERE verb = 'void' ON CONFLICT DO NOTHING;

-- name: all_pending
SELECT account, reservation, sequence FROM pending;

-- name: accounts_of_entries
SELECT DISTINCT account FROM entries;

-- name: stray_note
SELECT notes.account, notes.sequence
FROM notes LEFT JOIN entries ON entries.account = notes.account AND entries.sequence = notes.sequence
WHERE entries.account IS NULL LIMIT 1;

-- name: sizes
SELECT (SELECT count(*) FROM entries), (SELECT count(*) FROM keys);

-- name: principal
SELECT identity FROM principals WHERE name = ?;

-- name: add_principal
INSERT INTO principals (identity, name) VALUES (?, ?) ON CONFLICT (name) DO NOTHING;

-- name: forget_principals
DELETE FROM principals;

-- name: principals
SELECT identity, name FROM principals WHERE name >= ' ';

-- name: erase_note
DELETE FROM notes WHERE account = ? AND sequence = ?;

-- The identity stays, as its keys do. Its name becomes a string that no name can be: it sorts before the space, which
-- is the first printable character.

-- name: erase_principal
UPDATE principals SET name = char(10) || identity WHERE name = ?;

-- name: mark_erased
INSERT INTO principals (identity, name)
SELECT DISTINCT owner, char(10) || owner FROM keys
WHERE owner <> '' AND owner NOT IN (SELECT identity FROM principals);
