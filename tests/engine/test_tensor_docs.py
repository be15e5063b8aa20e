"""The programs of docs/tensors.md about rank-local tensors and pipelines run as they are written."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "tensors.md"


def test_snippets_of_local_tensors_and_pipelines_run(program: Any) -> None:
    text = PAGE.read_text(encoding="utf-8")
    start, end = text.index("## Rank-local tensors"), text.index("## Will it fit?")
    blocks = re.findall(r"```python\n(.*?)```", text[start:end], re.DOTALL)
    assert len(blocks) == 4
    printed = program("\n".join([*blocks, "print('last loss', loss.item() > 0)"]), timeout=240).ok()
    assert printed.splitlines()[-1] == "last loss True" and printed.startswith("tensor(")
