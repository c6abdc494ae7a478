"""A hook of mkdocs: links from docs/ to other files of the repository lead to the repository on the web.

On disk and on GitHub such links are relative (`../CONTRIBUTING.md`); the site holds only docs/.
"""

from __future__ import annotations

import re
from typing import Any

_OUTSIDE = re.compile(r"(\]\()\.\./")


def on_page_markdown(markdown: str, config: Any, **_: Any) -> str:
    """Replace `](../PATH` by the address of PATH in the repository."""
    return _OUTSIDE.sub(rf"\g<1>{config.repo_url}/blob/main/", markdown)
