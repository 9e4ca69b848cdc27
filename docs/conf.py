"""Configuration of the site: `make docs`."""

from __future__ import annotations

import gc
import re
import shutil
from pathlib import Path

from sphinx.application import Sphinx

from rallypoint import __version__


# A build ends before its garbage matters: collections are a third of the CPU time.
gc.disable()

REPOSITORY = Path(__file__).parent.parent

project = "Rallypoint"
author = "The Rallypoint authors"
copyright = "the Rallypoint authors; Apache-2.0"  # noqa: A001  # Sphinx's name for it
version = release = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "Rallypoint"
html_show_sphinx = False

myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]
myst_url_schemes = {"http": None, "https": None, "repository": {"url": "files/{{path}}"}}

autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
napoleon_use_rtype = False
# As in dataclasses: the fields with their first line.
napoleon_use_ivar = True
suppress_warnings = [
    # Names that a package re-exports are documented twice: there and where they are defined.
    "ref.python",
]

# Pages link to files outside docs/ by relative paths, as a repository browser expects. The site contains copies.
_OUTSIDE = re.compile(r"\]\(\.\./([^)#]+)")
_linked: set[str] = set()


def _collect_links(_app: Sphinx, page: str, source: list[str]) -> None:
    if "/" in page:
        return  # from a subfolder, ../ leads to another page
    _linked.update(_OUTSIDE.findall(source[0]))
    source[0] = _OUTSIDE.sub(r"](repository:\1", source[0])


def _copy_linked(app: Sphinx, failed: Exception | None) -> None:
    if failed is not None or app.builder.name != "html":
        return
    for path in sorted(_linked):
        target = Path(app.outdir) / "files" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        if (REPOSITORY / path).is_dir():
            shutil.copytree(REPOSITORY / path, target, dirs_exist_ok=True)
        else:
            shutil.copy(REPOSITORY / path, target)


# Docstrings have these on separate lines, without blank lines between them and the sections.
_SECTION = re.compile(r"(Args|Returns|Raises|Yields|Attributes):$")
_REMARK = re.compile(r"(Collective|Blocks|Threads|Signals|Effects|Gradient|Source):")


def _spread(
    _app: Sphinx, _what: str, _name: str, _obj: object, _options: object, lines: list[str]
) -> None:
    spread: list[str] = []
    for line in lines:
        if _SECTION.match(line) or _REMARK.match(line):
            spread.append("")
        spread.append(
            re.sub(rf"(?:^| +)({_REMARK.pattern})", r" **\1**", line).lstrip()
            if _REMARK.match(line)
            else line
        )
    lines[:] = spread


def setup(app: Sphinx) -> None:
    app.connect("autodoc-process-docstring", _spread, priority=100)  # before napoleon's
    app.connect("source-read", _collect_links)
    app.connect("build-finished", _copy_linked)
