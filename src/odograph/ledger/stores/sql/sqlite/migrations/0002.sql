-- Schema 2: the steps of a population are entries.

-- SQLite cannot alter a CHECK. A wider one changes nothing that is stored, so its text is replaced, as SQLite's own
-- documentation of ALTER TABLE does it; making a trigger again tells other connections that the schema has changed.
PRAGMA writable_schema = ON;
UPDATE sqlite_master SET sql = replace(sql, '''refuse'', ''close'')', '''refuse'', ''close'', ''step'')')
WHERE type = 'table' AND name = 'entries';
PRAGMA writable_schema = OFF;

DROP TRIGGER entries_stay;
CREATE TRIGGER entries_stay BEFORE UPDATE ON entries
BEGIN SELECT RAISE(ABORT, 'entries are never changed'); END;
