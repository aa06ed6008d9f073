-- From schema 1 to schema 2: a key can be retired when another takes its place.

ALTER TABLE keys ADD COLUMN retires INTEGER;

CREATE TRIGGER keys_stay_retired BEFORE UPDATE OF retires ON keys WHEN OLD.retires IS NOT NULL
BEGIN SELECT RAISE(ABORT, 'a key is retired once'); END;
