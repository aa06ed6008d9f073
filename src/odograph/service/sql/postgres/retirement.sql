-- From schema 1 to schema 2: a key can be retired when another takes its place.

ALTER TABLE odograph_access.keys ADD COLUMN retires bigint;

CREATE TRIGGER keys_stay_retired BEFORE UPDATE OF retires ON odograph_access.keys
FOR EACH ROW WHEN (OLD.retires IS NOT NULL) EXECUTE FUNCTION odograph_access.refuse();
