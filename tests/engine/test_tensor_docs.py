"""The programs of docs/tensors.md about rank-local tensors and pipelines run as they are written."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "tensors.md"


def test_snippets_of_local_tensors_and_pipelines_run(tmp_path: Path) -> None:
    text = PAGE.read_text(encoding="utf-8")
    start, end = text.index("## Rank-local tensors"), text.index("## Will it fit?")
    blocks = re.findall(r"```python\n(.*?)```", text[start:end], re.DOTALL)
    assert len(blocks) == 4
    script = tmp_path / "snippets.py"
    script.write_text("\n".join([*blocks, "print('last loss', loss.item() > 0)"]), encoding="utf-8")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "last loss True" and done.stdout.startswith("tensor(")
