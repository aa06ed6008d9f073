"""The ledger's verbs over HTTP: `odograph.connect("https://...", token=...)`."""

from odograph.client.backend import RemoteBackend
from odograph.client.transport import Transport

__all__ = ["RemoteBackend", "Transport"]
