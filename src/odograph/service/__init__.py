"""One budget authority for a team: the ledger's verbs over HTTP, and a page people look at."""
