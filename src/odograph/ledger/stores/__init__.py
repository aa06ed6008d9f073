"""Where a ledger is kept: memory, one SQLite file, PostgreSQL."""
