"""The ledger's verbs over HTTP: `odograph.connect("https://...", token=...)`."""

from odograph.client.books import RemoteBooks
from odograph.client.wire import Wire

__all__ = ["RemoteBooks", "Wire"]
