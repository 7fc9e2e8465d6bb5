"""For the site only: links to source files, which it does not hold, become plain text."""

from __future__ import annotations

import re
from typing import Any

_OUT_OF_DOCS = re.compile(r"\[([^\]]+)\]\(\.\./[^)]*\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    return _OUT_OF_DOCS.sub(r"\1", markdown)
