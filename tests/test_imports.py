"""What may import what, which names are there, and what only a fresh process shows."""

import ast
import json
import runpy
import subprocess
import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import regtopk
from regtopk.__main__ import main

SOURCE = Path(regtopk.__file__).parent

# Arrows run down this list: a part imports itself and what stands lower, never a neighbour of its row.
ROWS = [
    "__main__",
    "cli",
    "lab.experiments lab.plan",
    "lab.report lab.launch",
    "lab.runs",
    "lab.method",
    "integrations",
    "distributed.checkpoints simulate",
    "distributed.gradients distributed.updates",
    "distributed.steps",
    "distributed.state",
    "distributed.requests",
    "distributed.transport",
    "distributed.options",
    "recipes",
    "rounds",
    "algorithms wire",
    "core",
    "kernels",
    "errors _version",
]
LEVELS = {part: level for level, row in enumerate(reversed(ROWS)) for part in row.split()}


def part_of(module: str) -> str | None:
    """The part of the package that a dotted name lies in; None outside the package."""
    names = module.split(".")
    if names[0] != "regtopk":
        return None
    return next((part for part in (".".join(names[1:3]), *names[1:2]) if part in LEVELS), "a front door")


@cache
def imports_of(path: Path) -> list[str]:
    """What a file imports, as dotted names; imports in functions and under TYPE_CHECKING included."""
    names = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def forbidden_imports(source: Path) -> list[str]:
    found = []
    for path in sorted(source.rglob("*.py")):
        module = ".".join(["regtopk", *path.relative_to(source).with_suffix("").parts])
        own = part_of(module)
        if module.endswith("__init__") and own == "a front door":  # it shows names of every floor behind it
            continue
        assert own in LEVELS, f"{path} belongs to no known part: give it a row here"
        for imported in imports_of(path):
            part = part_of(imported)
            if part is None or part == own or LEVELS.get(part, 99) < LEVELS[own]:
                continue
            if part == "a front door" and LEVELS[own] > LEVELS["integrations"]:  # what users import, too
                continue
            found.append(f"{path.relative_to(source)} imports {imported}")
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


def file_of(source: Path, module: str) -> Path | None:
    """The file that a dotted name, of a module or of a name in one, is imported from."""
    names = module.split(".")
    if names[0] != "regtopk":
        return None
    for parts in (names[1:], names[1:-1]):
        path = source.joinpath(*parts)
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.exists():
                return file
    raise AssertionError(f"{module} is not in {source}")


def import_circles(source: Path) -> list[str]:
    """The files that import themselves by way of others."""
    imports = {
        path: {file for module in imports_of(path) if (file := file_of(source, module)) not in (None, path)}
        for path in sorted(source.rglob("*.py"))
    }
    while leaves := {path for path, imported in imports.items() if not imported}:
        imports = {path: imported - leaves for path, imported in imports.items() if path not in leaves}
    circles = []
    for start in imports:
        seen, waiting = set[Path](), list(imports[start])
        while waiting:
            path = waiting.pop()
            if path not in seen:
                seen.add(path)
                waiting.extend(imports[path])
        if start in seen:
            circles.append(str(start.relative_to(source)))
    return circles


def test_no_file_imports_itself_by_way_of_others() -> None:
    assert import_circles(SOURCE) == []


def test_an_import_circle_is_found(tmp_path: Path) -> None:
    (tmp_path / "wire").mkdir()
    (tmp_path / "wire" / "__init__.py").write_text("from regtopk.wire.a import f\n")
    (tmp_path / "wire" / "a.py").write_text("def f():\n    from regtopk.wire import b\n")
    (tmp_path / "wire" / "b.py").write_text("if TYPE_CHECKING:\n    from regtopk.wire.c import g\n")
    (tmp_path / "wire" / "c.py").write_text("import torch\nimport regtopk.wire.a\n")
    (tmp_path / "d.py").write_text("from regtopk.wire import f\nfrom regtopk import wire\n")
    assert import_circles(tmp_path) == ["wire/a.py", "wire/b.py", "wire/c.py"]


def test_a_class_name_means_one_thing() -> None:
    defined: dict[str, list[str]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                defined.setdefault(node.name, []).append(str(path.relative_to(SOURCE)))
    assert {name: files for name, files in defined.items() if len(files) > 1} == {}


def test_no_room_is_a_hall() -> None:
    sizes = {path.parent: len(list(path.parent.glob("*.py"))) for path in SOURCE.rglob("*.py")}
    open_ended = {SOURCE / "algorithms", SOURCE / "core"}
    assert {str(room): size for room, size in sizes.items() if size > 12 and room not in open_ended} == {}


# The algorithms themselves are not listed: a new one is an entry of the table, and of nothing else.
FOR_TRAINING = """
ALGORITHMS PosteriorScore WarmUp RegtopkError __version__ core errors recipes simulate Link
Checkpoints Exchange ExchangeBase ExchangeOptions OneProcess ShardedHookState SparseHookState StepRecord
UpdateExchange attach merge_state_dicts sparse_hook
"""
FOR_ALGORITHMS = """
Algorithm WithDensity Sparsifier ErrorFeedback Conversation Promise Promises converse WarmUp
SparseSum SenderSum OfSenders impute_ mean_of_senders
DenseSum ToOwners FromOwners Gather Gathered Broadcast Peek Request SparseGradient clear_at_ take to_dense
State NoState ResidualState extended per_worker shared Worker Layer Layout Report
find_largest_ send_instead_ take_above_ take_all_above_ take_at_ take_largest_ take_where_
random_sequence random_subset uniform exact_sum to_integers VALUE_CODES is_lossless quantise
option within integer one_of true_or_false aggregate_from_parameters
"""


@pytest.mark.parametrize(("module", "names"), [(regtopk, FOR_TRAINING), (regtopk.core, FOR_ALGORITHMS)])
def test_exported_names(module: ModuleType, names: str) -> None:
    algorithms = [kind.__name__ for kind in regtopk.ALGORITHMS.values()] if module is regtopk else []
    assert sorted(module.__all__) == sorted([*names.split(), *algorithms])
    public = {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    }
    assert public <= set(module.__all__), f"not in __all__: {public - set(module.__all__)}"
    assert all(hasattr(module, name) for name in module.__all__)


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_command_without_its_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], missing: str
) -> None:
    for name in [name for name in sys.modules if f"{name}.".startswith((f"{missing}.", "regtopk.cli."))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.setattr(sys, "argv", ["regtopk", "--version"])
    main()
    assert capsys.readouterr() == (f"regtopk {regtopk.__version__}\n", "")
    monkeypatch.setattr(sys, "argv", ["regtopk", "train"])
    with pytest.raises(SystemExit) as done:
        main()
    out, err = capsys.readouterr()
    assert (done.value.code, out, err.count("\n")) == (2, "", 1) and "pip install 'regtopk[all]'" in err


def test_benchmarks_run_as_scripts_and_as_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = SOURCE.parents[1] / "benchmarks"
    places = [place for place in sys.path if place not in (str(folder.parent), "")]
    monkeypatch.setattr(sys, "path", [*sys.path])  # `benchmarks` adds to it
    for path in folder.glob("*.py"):
        if path.stem != "torchft_kills":
            import_module(f"benchmarks.{path.stem}")
    for name, module in [*sys.modules.items()]:
        if str(getattr(module, "__file__", "")).startswith(str(folder)):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [str(folder), *places])  # a script finds what lies beside it
    runpy.run_path(str(folder / "wire.py"))


EXTRAS = [
    *("typer", "rich", "matplotlib", "sklearn", "numba", "scipy", "pandas", "PIL", "torchft", "flwr"),
    *("triton", "accelerate", "lightning", "ray", "tokenizers", "transformers"),
]
CODE = """
import json, sys, numpy, torch
before = set(sys.modules)
import regtopk
imported = sorted({name.partition(".")[0] for name in set(sys.modules) - before})
from regtopk.kernels.cpu import selection as cpu
threads = []
for wanted in (1, 2, 3):
    torch.set_num_threads(wanted)
    cpu.take_largest_(torch.randn(1 << 18), torch.randn(1 << 18), 100)
    torch.randn(1 << 18).add_(1)
    threads.append(torch.get_num_threads())
print(json.dumps({"imported": imported, "threads": threads}))
"""


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    """One process for both tests: it takes seconds to import torch."""
    answer = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(answer.stdout)
    return found


def test_plain_import_brings_no_extra(seen: dict[str, Any]) -> None:
    assert "regtopk" in seen["imported"]
    assert set(seen["imported"]) & set(EXTRAS) == set()


def test_the_first_call_leaves_torchs_number_of_threads_alone(seen: dict[str, Any]) -> None:
    assert seen["threads"] == [1, 2, 3]
