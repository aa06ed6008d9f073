-- Schema 2: the steps of a population are entries.

ALTER TABLE odograph.entries DROP CONSTRAINT entries_verb_check;
ALTER TABLE odograph.entries ADD CONSTRAINT entries_verb_check
    CHECK (verb IN ('open', 'spend', 'reserve', 'commit', 'void', 'refuse', 'close', 'step'));
