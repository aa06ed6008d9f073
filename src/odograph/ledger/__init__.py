"""Durable accounts: entries that follow from each other, stores that keep them, and the verbs on top."""
