"""FastAPI answering a constant: the baseline for the service's durable spends."""

from __future__ import annotations

from fastapi import FastAPI

app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)


@app.post("/constant")
async def constant() -> dict[str, bool]:
    """Answer without doing anything."""
    return {"ok": True}
