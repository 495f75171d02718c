"""The command `regtopk`, also as `python -m regtopk`."""

import io
import signal
import sys

from regtopk._version import __version__


def main() -> None:
    """Run the command line; say what to install if its extra is missing."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends its ranks, too
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # an ASCII terminal shows ? for what it has no sign for
    try:
        from regtopk.cli import app
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("typer", "rich"):
            raise
        if sys.argv[1:] == ["--version"]:
            print(f"regtopk {__version__}")
            return
        print(
            "regtopk: the command line needs an extra: pip install 'regtopk[all]', or in a checkout "
            "pip install '.[all]'",
            file=sys.stderr,
        )
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    app(prog_name="regtopk")


if __name__ == "__main__":
    main()
