"""Sphinx configuration for `make docs`. Neither the build nor the site loads anything from the network."""  # noqa: INP001  read by Sphinx

from __future__ import annotations

import re
import sys
from functools import partial
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

from docutils.nodes import SkipNode
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.util import inspect, logging

import odograph
import reference_pages

project = "Odograph"
project_copyright = "the authors of Odograph; Apache-2.0"
version = release = version_of("odograph")
html_title = f"{project} {release}"

extensions = ["myst_parser", "sphinx.ext.autodoc"]
myst_enable_extensions = ["deflist", "dollarmath"]
myst_heading_anchors = 3
smartquotes = False  # "--json" is an option, not a dash
highlight_language = "none"

default_role = "py:obj"  # `name` in a docstring is a link if the name is documented, else code
autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_class_signature = "mixed"
autodoc_mock_imports = ["diffprivlib", "opacus", "torch"]  # large, and not required for the docs
autodoc_typehints_format = "short"
autodoc_type_aliases = {name: name for name in reference_pages.ALIASES}
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
add_module_names = False

html_math_renderer = "mathml"
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["custom.css"]
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {"top_of_page_buttons": []}


def add_generated(_app: Any, name: str, source: list[str]) -> None:  # noqa: ANN401  Sphinx's own types are in its manual
    """Append the generated part of a page to its hand-written part."""
    if name in reference_pages.PAGES:
        source[0] = "\n".join([source[0], *reference_pages.PAGES[name](), ""])


def always_read(*_: Any) -> list[str]:
    """Return the pages with generated parts, which may change although their files do not."""
    return [*reference_pages.PAGES]


def show_docstring(_app: Any, _what: str, _name: str, _thing: Any, _options: Any, lines: list[str]) -> None:  # noqa: ANN401  Sphinx calls it so
    """Convert a docstring to reStructuredText."""
    lines[:] = reference_pages.to_restructured("\n".join(lines)).splitlines()


def show_signature(_app: Any, what: str, _name: str, thing: Any, _options: Any, *pair: str | None) -> tuple[Any, Any]:  # noqa: ANN401  as above
    """Correct the signatures that Sphinx cannot show well."""
    signature, returned = (text or "" for text in pair)
    if what == "class" and signature.startswith("(*args"):  # of a base class that is not imported
        own = inspect.signature(thing.__init__, bound_method=True)
        signature = inspect.stringify_signature(own, show_return_annotation=False, unqualified_typehints=True)
    if re.search(r"Backend|Engine", signature):  # only the library constructs these
        signature = ""
    alias = re.compile(r"TypeAliasForwardRef\('(\w+)'\)")  # an alias inside another type
    signature, returned = (alias.sub(r"\1", text).replace("[[...], ", "[..., ") for text in (signature, returned))
    return signature if pair[0] else None, returned or None


def leave_out(_app: Any, _what: str, _name: str, thing: Any, _skip: bool, _options: Any) -> bool | None:  # noqa: ANN401, FBT001  as above
    """Leave out the fields of a named tuple: the signature lists them, and they have no docstring."""
    return True if str(getattr(thing, "__doc__", "")).startswith("Alias for field number") else None


def by_public_name(app: Any, env: Any, node: Any, text: Any) -> Any:  # noqa: ANN401  as above
    """Resolve a type by its public name, wherever it is defined."""
    name = str(node.get("reftarget", "")).rpartition(".")[2]
    if node.get("refdomain") != "py" or name not in odograph.__all__:
        return None
    python = env.domains["py"]
    return python.resolve_xref(env, node["refdoc"], app.builder, "obj", f"odograph.{name}", node, text)


def show_formula(writer: Any, node: Any, *, as_block: bool) -> None:  # noqa: ANN401  as above
    """Write a formula as MathML, which browsers render natively; MathJax would be loaded from another host."""
    try:
        writer.body.append(tex2mathml(node.astext(), as_block=as_block))
    except MathError as problem:
        logging.getLogger(__name__).warning("no formula: %s", problem, location=node)
    raise SkipNode


def setup(app: Any) -> None:  # noqa: ANN401  as above
    """Register the handlers above."""
    inline, block = (partial(show_formula, as_block=as_block) for as_block in (False, True))
    app.add_html_math_renderer("mathml", inline_renderers=(inline, None), block_renderers=(block, None))
    app.connect("source-read", add_generated)
    app.connect("env-get-outdated", always_read)
    app.connect("autodoc-process-docstring", show_docstring)
    app.connect("autodoc-process-signature", show_signature)
    app.connect("autodoc-skip-member", leave_out)
    app.connect("missing-reference", by_public_name)
