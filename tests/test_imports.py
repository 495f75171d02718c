"""What may import what, and what a plain `import regtopk` brings along."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import regtopk

SOURCE = Path(regtopk.__file__).parent
EXTRAS = ("typer", "rich", "matplotlib", "sklearn", "numba", "scipy", "pandas", "PIL")

# arrows run down: a part may import itself and what stands lower, never its neighbours
LEVELS = {
    "__main__": 9,
    "cli": 8,
    "experiments": 7,
    "report": 7,
    "plan": 7,
    "run_writer": 6,
    "runs": 5,
    "method": 4,
    "simulate": 4,
    "distributed": 4,
    "algorithms": 3,
    "wire": 3,
    "core": 2,
    "kernels": 1,
    "errors": 0,
    "_version": 0,
}


def part_of(module: str) -> str | None:
    """The part of the package that a dotted name lies in; None outside the package."""
    names = module.split(".")
    if names[0] != "regtopk":
        return None
    return names[1] if len(names) > 1 and names[1] in LEVELS else "the package itself"


def imports_of(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def forbidden_imports(source: Path) -> list[str]:
    found = []
    for path in sorted(source.rglob("*.py")):
        own = path.relative_to(source).parts[0].removesuffix(".py")
        if own == "__init__":  # the front door shows names of every floor
            continue
        assert own in LEVELS, f"{path} belongs to no known part: give it a level here"
        for module in imports_of(path):
            part = part_of(module)
            if part is None or part == own or LEVELS.get(part, 99) < LEVELS[own]:
                continue
            if part == "the package itself" and own == "cli":
                continue
            found.append(f"{path.relative_to(source)} imports {module}")
    return found


def test_arrows_run_down() -> None:
    assert forbidden_imports(SOURCE) == []


def test_an_arrow_that_runs_up_is_found(tmp_path: Path) -> None:
    (tmp_path / "core").mkdir()
    (tmp_path / "core" / "bad.py").write_text("from regtopk.simulate import Cluster\nimport torch\n")
    (tmp_path / "wire").mkdir()
    (tmp_path / "wire" / "bad.py").write_text("from regtopk import algorithms\n")
    assert forbidden_imports(tmp_path) == [
        "core/bad.py imports regtopk.simulate.Cluster",
        "wire/bad.py imports regtopk.algorithms",
    ]


def test_plain_import_brings_no_extra() -> None:
    code = (
        "import sys, numpy, torch; before = set(sys.modules); import regtopk; "
        "print(*sorted({name.partition('.')[0] for name in set(sys.modules) - before}))"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "regtopk" in answer.stdout.split()
    assert set(answer.stdout.split()) & {*EXTRAS, "triton"} == set()


def test_exported_names() -> None:
    exported = regtopk.__all__
    assert exported == sorted(set(exported))
    assert all(hasattr(regtopk, name) for name in exported)
    public = {
        name
        for name, value in vars(regtopk).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    }
    assert public <= set(exported), f"not in __all__: {public - set(exported)}"


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_command_without_its_extra(missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; from regtopk.__main__ import main; main()"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert answer.returncode == 2
    assert answer.stderr == "regtopk: the command line needs an extra: pip install 'regtopk[cli]'\n"
