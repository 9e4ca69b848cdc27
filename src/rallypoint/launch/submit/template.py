"""Templates: texts with fields as ``string.Template`` has them. Pure."""

from __future__ import annotations

import string
from collections.abc import Mapping

from rallypoint._core import near_words
from rallypoint.errors import ConfigError


# The file of each engine, here and where a site has its own.
FILES: Mapping[str, str] = {
    "slurm": "slurm.sh",
    "k8s": "k8s.json",
    "ssh": "ssh.sh",
    "ray": "ray.sh",
}


def fill(text: str, fields: Mapping[str, str], shown: str) -> str:
    """The text with its fields replaced. A line that consists of an empty field is left out.

    Args:
        text: the template's text.
        fields: their values.
        shown: the template's name, for errors.

    Raises:
        ConfigError: it has an unknown field, or a ``$`` without one.
    """
    lines = []
    for number, line in enumerate(text.splitlines(), start=1):
        template = string.Template(line)
        place = f"{shown}, line {number}"
        if not template.is_valid():
            raise ConfigError(place, line.strip(), "a $ without a field", "write $$ for a $")
        for name in template.get_identifiers():
            if name not in fields:
                near = near_words.nearest(name, fields)
                known = f"known: {', '.join(sorted(fields))}"
                hint = f"did you mean ${near}?" if near else f"write $${name} for the shell's"
                raise ConfigError(place, f"${name}", f"no such field ({known})", hint)
        filled = template.substitute(fields)
        if filled.strip() or not line.strip():
            lines.append(filled)
    return "\n".join(lines) + "\n"
