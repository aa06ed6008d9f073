"""The site: built without a warning, whole, asking nobody else for anything, with everything public in it."""

from __future__ import annotations

import posixpath
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import typer

import odograph
from odograph.cli.app import app
from odograph.errors import ERROR_TABLE
from odograph.service.openapi import describe
from odograph.service.routes import ROUTES

DOCS = Path(__file__).resolve().parents[2] / "docs"
SOURCE = Path(odograph.__file__).parent
HEADINGS = {"h1", "h2", "h3", "h4"}
CODE = {"pre", "code", "script"}
LOADED = {"audio", "embed", "iframe", "image", "img", "input", "script", "source", "track", "use", "video"}


class Page(HTMLParser):
    """What a page has, links to and loads."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.headings: list[str] = []
        self.text = ""
        self.prose = ""
        self._in_heading = False
        self._in_code = 0
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        self.loads += addresses(given.get("style", ""))
        if tag in LOADED:
            found = [given[name] for name in ("src", "href", "xlink:href", "poster", "data") if name in given]
            found += [part.split()[0] for part in given.get("srcset", "").split(",") if part.strip()]
            self.loads += found
            self.links += [one for one in found if not one.startswith("data:")]
        elif "href" in given:
            self.links.append(given["href"])
            if tag == "link":
                self.loads.append(given["href"])
        self._in_code += tag in CODE
        if tag in HEADINGS:
            self._in_heading = True
            self.headings.append("")

    def handle_endtag(self, tag: str) -> None:
        self._in_heading = self._in_heading and tag not in HEADINGS
        self._in_code -= tag in CODE

    def handle_data(self, data: str) -> None:
        self.text += data
        self.prose += "" if self._in_code else data
        if self._in_heading:
            self.headings[-1] += data.removesuffix("¶")


def addresses(style: str) -> list[str]:
    """What a style sheet loads."""
    found = re.findall(r"""url\(\s*['"]?([^'")]+)|@import\s+['"]([^'"]+)""", style)
    return [one or other for one, other in found]


def dangling(pages: Mapping[str, Page], files: set[str]) -> list[str]:
    """Links to files or to places on pages that are not there."""
    found = []
    for name, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            path = posixpath.normpath(posixpath.join(posixpath.dirname(name), unquote(parts.path)))
            target = path if parts.path else name
            anchors = pages[target].anchors if target in pages else set()
            if target not in files or (parts.fragment and unquote(parts.fragment) not in anchors):
                found.append(f"{name}: {link}")
    return found


def elsewhere(loads: Mapping[str, list[str]]) -> list[str]:
    """What is loaded from another host, by whatever loads it."""
    return [f"{name}: {one}" for name, found in loads.items() for one in found if urlsplit(one).netloc]


def undrawn(pages: Mapping[str, Page]) -> list[str]:
    """Formulas that stand on a page as they were written."""
    return [f"{name}: {one}" for name, page in pages.items() for one in re.findall(r"\$+[^$]+\$+", page.prose)]


def commands(command: Any, path: str) -> Iterator[tuple[str, set[str]]]:  # noqa: ANN401  Typer keeps this type to itself
    """Every command, with the options that it takes."""
    yield path, {name for one in command.params for name in one.opts if name.startswith("--")}
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, f"{path} {name}")


def unnamed(pages: Mapping[str, Page]) -> list[str]:
    """What is public and not in the reference: names, commands, options, paths, types, errors, theorems."""
    missing = {f"odograph.{name}" for name in odograph.__all__}
    missing |= {f"odograph.odometers.{name}" for name in odograph.odometers.__all__ if name != "Reading"}
    missing |= {f"odograph.integrations.{path.stem}" for path in (SOURCE / "integrations").glob("[a-z]*.py")}
    missing |= {error.__name__ for error in ERROR_TABLE}
    anchors = {
        one.removeprefix("module-") for name, page in pages.items() if "reference/" in name for one in page.anchors
    }
    missing -= anchors | {one.rpartition(".")[2] for one in pages["reference/errors.html"].anchors}

    cli, http = pages["reference/cli.html"], pages["reference/http.html"]
    words = {*re.findall(r"--[a-z-]+", cli.text)}
    for path, options in commands(typer.main.get_command(app), "odograph"):
        missing |= ({path} if path != "odograph" else set()) - {*cli.headings}
        missing |= options - words - {"--version", "--install-completion", "--show-completion"}

    document = describe(ROUTES)
    asked = {f"{method.upper()} {path}" for path, methods in document["paths"].items() for method in methods}
    queries = {route.query.__name__ for route in ROUTES if route.query is not None}  # shown as parameters
    missing |= (asked | {*document["components"]["schemas"]}) - queries - {*http.headings}

    cited = sum(len(re.findall(r"^ +Assumes: ", path.read_text(), re.MULTILINE)) for path in SOURCE.rglob("*.py"))
    if pages["reference/theorems.html"].text.count("Assumes:") != cited:
        missing.add("theorems")
    return sorted(missing)


def build(source: Path, out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-E", "-b", "html", "-c", str(DOCS)]
    command += ["-d", str(out.with_name("doctrees")), str(source), str(out)]
    return subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603  Sphinx


def test_the_site_is_built_without_a_warning_and_is_whole(tmp_path: Path) -> None:
    # One test, so that the site is built once.
    site = tmp_path / "site"
    built = build(DOCS, site)
    assert built.stderr == ""
    assert built.returncode == 0
    files = {path.relative_to(site).as_posix() for path in site.rglob("*") if path.is_file()}
    pages = {name: Page((site / name).read_text()) for name in files if name.endswith(".html")}
    sheets = {name: addresses((site / name).read_text()) for name in files if name.endswith(".css")}
    assert len(pages) > 40
    assert dangling(pages, files) == []
    assert elsewhere({name: page.loads for name, page in pages.items()} | sheets) == []
    assert undrawn(pages) == []
    assert "<math" in (site / "concepts/the-exact-filter.html").read_text()
    assert unnamed(pages) == []

    pages["reference/cli.html"] = Page("")
    pages["reference/api/ledger.html"] = Page("")
    pages["reference/theorems.html"] = Page("Assumes: nothing")
    assert {"odograph.connect", "odograph.Ledger", "odograph keys make", "--epsilon", "theorems"} <= {*unnamed(pages)}
    pages["reference/http.html"] = Page("<h3>GET <code>/v1/accounts</code><a href='#get'>¶</a></h3>")
    pages["reference/errors.html"] = Page("")
    lost = unnamed(pages)
    assert {"POST /v1/accounts", "Problem", "NotPermitted", "odograph.BudgetExceeded"} <= {*lost}
    assert "GET /v1/accounts" not in lost


def test_a_page_with_a_link_to_nowhere_or_a_wrong_formula_fails_the_build(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("# A page\n\n[There](#nowhere) is [nothing](there.md) $\\nosuch$.\n")
    built = build(tmp_path / "docs", tmp_path / "site")
    assert built.returncode != 0
    assert "nowhere" in built.stderr
    assert "there.md" in built.stderr
    assert "no formula" in built.stderr


def test_links_to_nowhere_are_caught() -> None:
    links = [
        "b.html#here",
        "b.html#gone",
        "c.html",
        "#top",
        "#bottom",
        "x.png",
        "https://example.org/none",
        "../up.html",
    ]
    html = "".join(f'<a href="{link}">x</a>' for link in links) + '<p id="top"><img src="y.png">'
    pages = {"in/a.html": Page(html), "in/b.html": Page('<h2 id="here">x</h2>'), "up.html": Page("")}
    found = dangling(pages, {*pages, "in/x.png"})
    assert found == [f"in/a.html: {link}" for link in ("b.html#gone", "c.html", "#bottom", "y.png")]


def test_a_formula_that_is_not_drawn_is_caught() -> None:
    drawn = Page("<math><mi>x</mi></math> for $5")
    assert undrawn({"a": Page("<p>so $x^2$ is</p><pre>$HOME $PATH$</pre>"), "b": drawn}) == ["a: $x^2$"]


def test_what_comes_from_another_host_is_caught() -> None:
    page = Page(
        '<link rel="stylesheet" href="https://a.example/x.css"><script src="//b.example/x.js"></script>'
        '<img src="x.png" srcset="y.png 1x, https://c.example/z.png 2x"><p style="background: url(http://d.example/p)">'
        '<a href="https://example.org/">only a link</a><img src="data:image/png;base64,AAAA">'
    )
    sheet = addresses(
        "@import 'https://e.example/f.css'; @font-face { src: url(\"https://g.example/f\"), url(f.woff) }"
    )
    found = elsewhere({"page": page.loads, "sheet": sheet})
    assert [re.findall(r"[a-g]\.example", one) for one in found] == [[f"{name}.example"] for name in "abcdeg"]
