"""Run the tutorial, docs/tutorial.ipynb, and keep what its cells print: python -m tools.notebook.

Its cells have two kinds of code: `%%writefile NAME` with a file below it, and `!` with a command. Neither
needs Jupyter. The test of the tutorial runs the same cells on ranks that have started before.
"""

import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

TUTORIAL = Path(__file__).parents[1] / "docs" / "tutorial.ipynb"
WRITES, RUNS = "%%writefile ", "!"
Cell = dict[str, Any]


def run_cells(cells: list[Cell], folder: Path, run: Callable[[list[str]], str]) -> list[str]:
    """What each cell of code prints; files go into the folder, and commands to `run`."""
    printed = []
    for source in ("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"):
        if source.startswith(WRITES):
            name, _, text = source.removeprefix(WRITES).partition("\n")
            (folder / name).write_text(f"{text}\n", encoding="utf-8")
            printed.append("")
        else:
            printed.append(run(shlex.split(source.removeprefix(RUNS))))
    return printed


def as_markdown(notebook: str) -> str:
    """The notebook as a page: its text, and its code with what it printed below."""
    parts = []
    for cell in json.loads(notebook)["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        name, _, text = source.removeprefix(WRITES).partition("\n")
        is_file = source.startswith(WRITES)
        parts.append(f"`{name}`:\n\n```python\n{text}\n```" if is_file else f"```sh\n{source[1:]}\n```")
        parts += [f"```text\n{''.join(output['text'])}```" for output in cell["outputs"]]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """Write what the cells print into the notebook."""
    notebook = json.loads(TUTORIAL.read_text(encoding="utf-8"))
    programs = str(Path(sys.executable).parent)
    environment = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:

        def run(words: list[str]) -> str:
            told = subprocess.run(words, cwd=folder, env=environment, stdout=subprocess.PIPE, check=True)
            return told.stdout.decode()

        printed = run_cells(notebook["cells"], Path(folder), run)
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            text = printed.pop(0)
            lines = [{"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)}]
            cell["outputs"] = lines if text else []
    TUTORIAL.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
