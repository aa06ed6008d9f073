"""The ledger's verbs over HTTP: `odograph.connect("https://...", token=...)` and `odograph.aconnect`."""

from odograph.client.backend import RemoteBackend
from odograph.client.transport import Caller, Transport

__all__ = ["Caller", "RemoteBackend", "Transport"]
