"""Clients that are generated from the description: they compile, and spend against the real service.

They are made by openapi-python-client, and by OpenAPI Generator for typescript-fetch, whose jar PyPI has. The former
and the compiler of TypeScript are installed by the tests.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from openapi_generator_cli import run as generator_command
from openapi_spec_validator import validate
from service_server import ServiceThread

from odograph.service import openapi
from odograph.service.routes import ROUTES

FULL: Final = os.environ.get("ODOGRAPH_FULL") == "1"
REASON: Final = "generates and compiles for half a minute: ODOGRAPH_FULL=1 (make test-all)"
PYTHON_GENERATOR: Final = "openapi-python-client>=0.29,<1"
TYPESCRIPT: Final = "typescript@5.9"
OVERRIDES: Final = dict.fromkeys(
    ("application/x-ndjson", "application/vnd.apache.parquet"), "application/octet-stream"
)
CONFIG: Final = {"content_type_overrides": OVERRIDES, "post_hooks": []}
TSCONFIG: Final = {
    "compilerOptions": {
        "target": "es2020",
        "module": "commonjs",
        "lib": ["es2020", "dom"],
        "strict": True,
        "outDir": "built",
        "types": [],
    },
    "include": ["**/*.ts"],
}
PROGRAM: Final = """
import { AccountsApi, ChargesApi, Configuration, ResponseError } from "./index";

declare const process: { argv: string[] };
declare const console: { log(text: string): void };

async function main(): Promise<void> {
  const configuration = new Configuration({ basePath: process.argv[2], accessToken: process.argv[3] });
  const charges = new ChargesApi(configuration);
  const spend = (epsilon: string, idempotencyKey: string) =>
    charges.spend({
      name: "census",
      idempotencyKey,
      spendForm: { cost: { kind: "pure", epsilon }, note: "from a generated client" },
    });
  const found: unknown[] = [];
  for (const key of ['"q-1"', '"q-1"']) {
    const receipt = await spend("0.1", key);
    found.push([receipt.id, receipt.repeated]);
  }
  try {
    await spend("5", '"q-2"');
  } catch (problem) {
    if (!(problem instanceof ResponseError)) throw problem;
    found.push([problem.response.status, (await problem.response.json()).code]);
  }
  const page = await new AccountsApi(configuration).entries({ name: "census", verb: "spend" });
  found.push(page.entries.map((entry) => entry.note));
  console.log(JSON.stringify(found));
}

void main();
"""
EXPECTED: Final = [
    ["census#1", False],
    ["census#1", True],
    [409, "BudgetExceeded"],
    ["from a generated client"],
]


def run(*command: str, folder: Path, timeout: float = 300) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=timeout, check=False)  # noqa: S603  our own
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def description(owner: httpx.Client, tmp_path: Path) -> Path:
    file = tmp_path / "openapi.json"
    file.write_bytes(owner.get("/v1/openapi.json").content)
    return file


def test_the_description_is_valid_and_has_a_schema_for_every_body() -> None:
    document = openapi.describe(ROUTES)
    validate(document)
    assert "prefixItems" not in json.dumps(document)
    for operations in document["paths"].values():
        for operation in operations.values():
            bodies = [operation.get("requestBody", {}), *operation["responses"].values()]
            assert all(content["schema"] for body in bodies for content in body.get("content", {}).values())
    document["components"]["schemas"]["PureDP"]["properties"]["epsilon"] = {"type": "nothing"}
    with pytest.raises(Exception, match="nothing"):  # the control; the validator's own error
        validate(document)


def test_every_format_is_one_that_generators_know_or_are_told_of_in_the_documents() -> None:
    operations = [one for path in openapi.describe(ROUTES)["paths"].values() for one in path.values()]
    bodies = [body for one in operations for body in (one.get("requestBody", {}), *one["responses"].values())]
    formats = {media_type for body in bodies for media_type in body.get("content", {})}
    assert formats - {"application/json", "application/problem+json", "text/plain"} == OVERRIDES.keys()
    text = (Path(__file__).parents[2] / "docs/service.md").read_text("utf-8")
    assert all(f"\n  {media_type}: {other}\n" in text for media_type, other in OVERRIDES.items())


@pytest.mark.long
def test_a_generated_python_client_spends(
    service: ServiceThread, description: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not FULL:
        pytest.skip(REASON)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    run(sys.executable, "-m", "venv", "generator", folder=tmp_path)  # its own: it takes no recent Typer
    install = [str(tmp_path / "generator/bin/pip"), "install", "--quiet", PYTHON_GENERATOR]
    done = subprocess.run(install, capture_output=True, text=True, timeout=300, check=False)  # noqa: S603  our own
    if done.returncode:
        pytest.skip(f"pip cannot install {PYTHON_GENERATOR}: {done.stderr.strip().splitlines()[-1:]}")
    program = str(tmp_path / "generator/bin/openapi-python-client")
    options = ["--config", "config.json", "--meta", "none", "--output-path", "generated", "--fail-on-warning"]
    run(program, "generate", "--path", description.name, *options, folder=tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    found = spend_with_python(importlib.import_module, service)
    assert found == EXPECTED


def spend_with_python(load: Any, service: ServiceThread) -> list[Any]:  # noqa: ANN401  imports what was generated
    models = load("generated.models")
    made = load("generated.client").AuthenticatedClient(base_url=service.url, token=service.token("olga"))
    with made as client:
        return spend_and_list(load, models, client)


def spend_and_list(load: Any, models: Any, client: Any) -> list[Any]:  # noqa: ANN401  as above
    found: list[Any] = []
    for epsilon, key in (("0.1", "q-1"), ("0.1", "q-1"), ("5", "q-2")):
        body = models.SpendForm(
            cost=models.PureDP(kind=models.PureDPKind.PURE, epsilon=epsilon), note="from a generated client"
        )
        answer = load("generated.api.charges.spend").sync("census", client=client, body=body, idempotency_key=key)
        is_receipt = isinstance(answer, models.ReceiptForm)
        found.append([answer.id, answer.repeated] if is_receipt else [answer.status, answer.code])
    page = load("generated.api.accounts.entries").sync("census", client=client, verb=models.EntriesVerb.SPEND)
    return [*found, [entry.note for entry in page.entries]]


@pytest.mark.long
def test_a_generated_typescript_client_compiles_and_spends(
    service: ServiceThread, description: Path, tmp_path: Path
) -> None:
    if not FULL:
        pytest.skip(REASON)
    for program in ("java", "node", "npm"):
        if shutil.which(program) is None:
            pytest.skip(f"there is no {program}")
    install = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(tmp_path / "compiler"), TYPESCRIPT]
    done = subprocess.run(install, capture_output=True, text=True, timeout=120, check=False)  # noqa: S603  our own
    if done.returncode:
        pytest.skip(f"npm cannot install {TYPESCRIPT}: {done.stderr.strip().splitlines()[-1:]}")
    generator_command(["generate", "-i", str(description), "-g", "typescript-fetch", "-o", str(tmp_path / "client")])
    (tmp_path / "client" / "tsconfig.json").write_text(json.dumps(TSCONFIG), encoding="utf-8")
    (tmp_path / "client" / "program.ts").write_text(PROGRAM, encoding="utf-8")
    run(str(tmp_path / "compiler/node_modules/.bin/tsc"), "-p", "client", folder=tmp_path)
    said = run("node", "client/built/program.js", service.url, service.token("olga"), folder=tmp_path)
    assert json.loads(said) == EXPECTED
