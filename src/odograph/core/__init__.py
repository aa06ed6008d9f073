"""Pure mathematics: no input or output, clock, randomness, logging or globals. NumPy and SciPy only."""
