"""Can this version be released? Builds it, and tries its wheel alone in empty environments.

    python -m tools.check_release --pythons python3.11 python3.12 --torches 2.13.0 2.11.0 newest

`make release-check` runs this. Every Python gets every torch, without extras and with `all`; the first torch
that installs gets each extra alone. Extras come in the versions that a user would get today. What cannot be
tried on this machine is named and skipped: a Python, a torch, or a torch that would bring CUDA along.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from email.message import Message
from email.parser import Parser
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "out" / "release"
DIST = FOLDER / "dist"
PIP = ("-m", "pip", "--disable-pip-version-check", "--quiet")
CUDA = ("nvidia-", "cuda-")  # how the names begin of what a build of torch for CUDA requires


class UnavailableError(Exception):
    """Something cannot be tried on this machine."""


def run(*words: str | Path, folder: Path = ROOT) -> str:
    """What a command prints; its errors are shown, and end the check of what it is part of."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        print(done.stdout, done.stderr, sep="\n", file=sys.stderr)
        done.check_returncode()
    return done.stdout


def wrong_names(root: Path, version: str, tag: str | None) -> Iterator[str]:
    """What does not name the version that was built: CITATION.cff, and where one is given, the tag."""
    if f"\nversion: {version}\n" not in (root / "CITATION.cff").read_text(encoding="utf-8"):
        yield f"CITATION.cff must name version {version}"
    if tag is None:
        return
    if tag != f"v{version}":
        yield f"tag must be v{version}, got {tag!r}"
    if f"\n## [{version}]" not in (root / "CHANGELOG.md").read_text(encoding="utf-8"):
        yield f"CHANGELOG.md must have a section [{version}]"


def new_environment(python: str | Path, folder: Path, *packages: str) -> Path:
    """An empty environment with the newest pip and the packages: its Python."""
    run(python, "-m", "venv", "--clear", folder)
    inside = folder / "bin" / "python"
    run(inside, *PIP, "install", "--upgrade", "pip", *packages)
    return inside


def build() -> Path:
    """Build the sdist and, from it, the wheel; check what both say and hold. The wheel is returned."""
    shutil.rmtree(DIST, ignore_errors=True)
    python = new_environment(sys.executable, FOLDER / "build", "build", "twine")
    run(python, "-m", "build", "--outdir", DIST, ROOT)
    (wheel,), (sdist,) = DIST.glob("*.whl"), DIST.glob("*.tar.gz")
    run(python, "-m", "twine", "check", "--strict", wheel, sdist)
    tracked = {name.removeprefix("src/") for name in run("git", "ls-files", "src/regtopk").split()}
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if name.startswith("regtopk/")}
    if tracked != found:
        names = ", ".join(sorted(tracked ^ found))
        sys.exit(f"the wheel must hold what git has of src/regtopk, but they differ in {names}")
    return wheel


def read_metadata(wheel: Path) -> Message:
    """What the wheel says of itself."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


def torch_pin(python: Path, wanted: str, *, with_cuda: bool) -> str:
    """The exact pin of a torch that pip finds for this Python; no build for CUDA unless one is wanted."""
    name = "torch" if wanted == "newest" else f"torch=={wanted}"
    try:
        # fast-deps: where an index has no metadata of its own, pip reads a part of the wheel instead of all
        look = "--use-feature=fast-deps", "--dry-run", "--no-deps", "--report", "-"
        report = run(python, *PIP, "install", *look, name)
    except subprocess.CalledProcessError:
        raise UnavailableError(f"pip finds no {name}") from None
    (found,) = (item["metadata"] for item in json.loads(report)["install"])
    if not with_cuda and any(line.startswith(CUDA) for line in found.get("requires_dist", [])):
        raise UnavailableError(f"torch {found['version']} would bring CUDA along; --with-cuda installs it")
    return f"torch=={found['version']}"


def make_base(python: str, wanted: str, *, with_cuda: bool) -> str:
    """Make an environment with torch alone, from which trials are copied: the pin of that torch."""
    try:
        run(python, "-c", "import sys; sys.exit(sys.version_info < (3, 10))")
    except (OSError, subprocess.CalledProcessError):
        raise UnavailableError("not on this machine, or older than 3.10") from None
    inside = new_environment(python, FOLDER / "base")
    pin = torch_pin(inside, wanted, with_cuda=with_cuda)
    run(inside, *PIP, "install", "--no-compile", pin)
    run(inside, "-c", "import torch._dynamo, torch.distributed.fsdp")  # compiled once for all trials
    return pin


def try_extra(wheel: Path, version: str, pin: str, extra: str) -> tuple[str, str]:
    """Install the wheel with an extra beside torch alone, and run the smoke test in an empty folder."""
    began, trial = time.monotonic(), FOLDER / f"trial-{extra}"
    shutil.rmtree(trial, ignore_errors=True)
    shutil.copytree(FOLDER / "base", trial, symlinks=True, copy_function=os.link)
    python, empty, pins = trial / "bin" / "python", trial / "empty", trial / "pins.txt"
    empty.mkdir()
    pins.write_text(f"{pin}\n")
    what = f"{wheel}[{extra}]" if extra else str(wheel)
    try:
        run(python, *PIP, "install", "--no-compile", what, "--constraint", pins)
        run(python, *PIP, "check")
        smoke = shutil.copy(ROOT / "tools" / "smoke.py", trial)
        run(python, "-I", smoke, version, extra, folder=empty)
        outcome = "passed"
    except subprocess.CalledProcessError:
        outcome = "failed"
    shutil.rmtree(trial)
    return outcome, f"{pin}, {extra or 'no extra'}, {time.monotonic() - began:.0f} s"


def trials(
    options: argparse.Namespace, wheel: Path, version: str, extras: Sequence[str]
) -> Iterator[tuple[str, str]]:
    """Try every Python with every torch: yields passed, failed or skipped, and what."""
    for python in options.pythons:
        tried: set[str] = set()
        for wanted in options.torches:
            try:
                pin = make_base(python, wanted, with_cuda=options.with_cuda)
            except UnavailableError as missing:
                yield "skipped", f"{python}, torch {wanted}: {missing}"
                continue
            except subprocess.CalledProcessError:
                yield "failed", f"{python}, torch {wanted}: no environment"
                continue
            chosen = () if pin in tried else ("", "all") if tried else ("", *extras)
            with ThreadPoolExecutor(os.cpu_count()) as pool:  # pip waits for the network most of the time
                for outcome, what in pool.map(partial(try_extra, wheel, version, pin), chosen):
                    yield outcome, f"{python}, {what}"
            tried.add(pin)


def is_refused(outcomes: Counter[str], *, strict: bool) -> bool:
    """Whether a trial failed, all were skipped or, if strict, one was."""
    is_skipped = outcomes["skipped"] > 0 and (strict or not outcomes["passed"])
    return outcomes["failed"] > 0 or is_skipped


def main() -> None:
    """Build, try, and exit with 1 if this cannot be released."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--pythons", nargs="*", default=[sys.executable], help="names or paths of interpreters"
    )
    parser.add_argument("--torches", nargs="+", default=["newest"], help="versions of torch, or newest")
    parser.add_argument("--extras", nargs="*", help="if not given, all that the wheel has")
    parser.add_argument("--wheel", type=Path, help="a wheel that was built before; else it is built")
    parser.add_argument("--tag", help="the tag that is released, such as v0.2.0")
    parser.add_argument("--strict", action="store_true", help="what is skipped is an error")
    parser.add_argument(
        "--with-cuda", action="store_true", help="install builds of torch that bring CUDA along"
    )
    options = parser.parse_args()

    wheel = build() if options.wheel is None else options.wheel.resolve()
    metadata = read_metadata(wheel)
    version = metadata["Version"]
    wrong = list(wrong_names(ROOT, version, options.tag))
    if wrong:
        sys.exit("\n".join(wrong))
    print(wheel.name, flush=True)
    extras = metadata.get_all("Provides-Extra", []) if options.extras is None else options.extras
    outcomes: Counter[str] = Counter()
    for outcome, what in trials(options, wheel, version, extras):
        print(f"{outcome.upper()}: {what}", flush=True)
        outcomes[outcome] += 1
    print(", ".join(f"{outcomes[outcome]} {outcome}" for outcome in ("passed", "failed", "skipped")))
    sys.exit(is_refused(outcomes, strict=options.strict))


if __name__ == "__main__":
    main()
