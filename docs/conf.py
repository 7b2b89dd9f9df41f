"""Build the documentation site: `make docs` writes it to build/docs.

The pages are plain Markdown that reads on a Git host too. Three kinds of pages are generated while building, into
docs/generated: the reference of the commands, from click; the reference of Python, from docstrings; and the files at
the top of the repository.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from docutils import nodes

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "scripts"))

import polyquant  # noqa: E402
import site_pages  # noqa: E402 - after the path

project = "polyquant"
author = "the polyquant authors"
copyright = "the polyquant authors, Apache-2.0"
version = release = polyquant.__version__
extensions = ["myst_parser", "sphinx_design", "sphinx.ext.autodoc"]
exclude_patterns = ["README.md"]  # the contents for readers of the files; index.md is that of the site
nitpicky = True
smartquotes = False  # they turn options into dashes
default_role = "code"  # `name` in docstrings
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence", "deflist"]
suppress_warnings = ["myst.header"]  # sections of docstrings start at any level
html_theme = "furo"
html_title = f"polyquant {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_class_signature = "separated"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 80

COMMENT = re.compile(r"^<!-- .*?-->\n", re.M | re.S)
EXAMPLES = re.compile(r"\[[^\]]+\]\((?:\.\./)*(examples/\w+)\)")
"""Links to folders, which are not part of the site."""
TOP = {"../README.md": "index.md", "../CONTRIBUTING.md": "contributing.md", "../CHANGELOG.md": "changelog.md"}

CONTENTS = {
    page: sorted(file.stem for file in (HERE / page).parent.glob("*.md") if file.stem != "README")
    for page in ("howto/README", "formats/README")
}
"""Pages that list those of their folder -> the names of these."""


def _site_text(app: Any, name: str, source: list[str]) -> None:
    """Remove comments, which are for the tests, and link to the generated copies of files outside this folder."""
    depth = name.count("/")
    text = COMMENT.sub("", source[0])
    for outside, page in TOP.items():
        place = page if page == "index.md" else f"generated/{page}"
        text = text.replace(f"]({'../' * depth}{outside}", f"]({'../' * depth}{place}")
    text = EXAMPLES.sub(r"`\1`", text)
    if name in CONTENTS:
        text += "\n```{toctree}\n:hidden:\n\n" + "\n".join(CONTENTS[name]) + "\n```\n"
    source[0] = text


def _public_name(app: Any, env: Any, node: Any, content: Any) -> Any:
    """Link an annotation to the public name of its class; one that is not public is only text."""
    if node.get("refdomain") != "py":
        return None
    public = f"polyquant.{node['reftarget'].rpartition('.')[2]}"
    found = env.get_domain("py").objects.get(public)
    if found is None:
        return content
    uri = app.builder.get_relative_uri(node["refdoc"], found.docname)
    return nodes.reference("", "", content, internal=True, refuri=f"{uri}#{found.node_id}")


def setup(app: Any) -> None:
    """Connect the steps above to the build."""
    site_pages.write(HERE / "generated")
    app.connect("source-read", _site_text)
    app.connect("missing-reference", _public_name)
