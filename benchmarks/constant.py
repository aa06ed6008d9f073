"""FastAPI answering a constant: the floor that the service's durable spends are measured against."""

from __future__ import annotations

from fastapi import FastAPI

app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)


@app.post("/constant")
async def constant() -> dict[str, bool]:
    """Answer without doing anything."""
    return {"ok": True}
