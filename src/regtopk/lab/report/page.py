"""The page of a run, or of several: one HTML file that needs nothing else, in light and dark."""

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from regtopk.errors import importing
from regtopk.lab.report.figure import draw_files, draw_inline, drawings_of, legend_of, styles_of_run
from regtopk.lab.report.style import GRID, INK, Style, columns_of, format_number, label_of
from regtopk.lab.runs import Run, parts_of, read_header, read_run, reading_from, writing_to
from regtopk.lab.runs.run import FIGURE_PNG, FIGURE_SVG, PAGE

# what the columns of a table are called in print, where that is not their key in summary.json
HEADINGS = {"measure": "", "test_loss": "test loss, nats (smaller is better)"}
# what a reader looks for first stands beside the methods' names
ANSWERS = ("speed-up", "step", "steps", "accuracy", "test_loss", "risk", "distance", "± std")

PAGE_COLOURS = {"ground": ("#ffffff", "#14171c"), "raised": ("#f6f7f9", "#1c2027")}  # on light, on dark
PAGE_COLOURS |= {"quiet": ("#5b6472", "#98a2b0"), "ink": INK, "grid": GRID}
CSS = Path(__file__).with_name("page.css")


def write_report(folder: Path) -> Path:
    """Draw a recorded run (or a folder of them): figure.png, figure.svg and the page, whose path is returned.

    Raises:
        OutputError: the folder holds no finished run that can be drawn, or it cannot be written.
        MissingExtraError: matplotlib is not installed.
    """
    header = read_header(folder)
    parts = parts_of(folder, header)
    advice = "figures need matplotlib: pip install 'regtopk[plots]', then regtopk report DIR"
    with importing(advice), reading_from(folder, "drawn"):
        runs = [read_run(part) for part in parts or [folder]]
        for run in runs:
            with writing_to(run.folder):
                draw_files(run, run.folder / FIGURE_PNG, run.folder / FIGURE_SVG)
                (run.folder / PAGE).write_text(_page(run.header, [run]), encoding="utf-8")
        if parts:
            with writing_to(folder):
                (folder / PAGE).write_text(_page(header, runs), encoding="utf-8")
    return folder / PAGE


def _page(header: dict[str, Any], runs: Sequence[Run]) -> str:
    is_single = header is runs[0].header
    body = [_opening("h1", header, runs[0].summary if is_single else {})]
    if "\n" not in header["command"]:  # several stand with the settings only
        body.append(f"<pre>{escape(header['command'])}</pre>")
    for run in runs:
        if not is_single:
            body.append(_opening("h2", run.header, run.summary))
        settings = escape(json.dumps(run.header["config"], indent=2))
        details = "<summary>Settings, and how to make this again</summary>"
        details += f"<pre>{escape(run.header['command'])}</pre><pre>{settings}</pre>"
        body += [_panels(run), _table(run), f"<details>{details}</details>"]
    pairs = dict(PAGE_COLOURS)
    for run in runs:
        pairs |= {style.variable: (style.light, style.dark) for style in styles_of_run(run).values()}
    light, dark = ("".join(f"--{name}:{pair[n]};" for name, pair in pairs.items()) for n in (0, 1))
    colours = f":root{{{light}}}@media(prefers-color-scheme:dark){{:root{{{dark}}}}}"
    versions = " · ".join(f"{name} {version}" for name, version in header["versions"].items())
    style = CSS.read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(header['title'])}</title>\n<style>{colours}\n{style}</style>\n</head>\n<body>\n"
        f"<main>\n{''.join(body)}\n<footer>{escape(versions)}</footer>\n</main>\n</body>\n</html>\n"
    )


def _opening(tag: str, header: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    finding = f"<p class=finding>{escape(summary['finding'])}</p>" if "finding" in summary else ""
    return f"<{tag}>{escape(header['title'])}</{tag}>{finding}<p>{escape(header['about'])}</p>"


def _legend(run: Run) -> str:
    """The methods' lines, and what there is to know of the spread."""
    styles = list(styles_of_run(run).values())
    keys = [f"<li>{_key(style)}{escape(style.label)}</li>" for style in legend_of(styles)]
    nums, said = {len(result["final"]) for result in run.summary.get("results", [])}, ""
    if nums == {1}:
        said = "One seed: the spread is not known, and small differences mean nothing."
    elif nums:
        several = f"{min(nums)} to {max(nums)}" if len(nums) > 1 else f"{max(nums)}"
        said = f"{several} seeds. Curves are medians, dots are means; shades and bars show the range."
    if len(keys) < len(styles):
        said += " Grey: the others; the table names them, and so does the pointer."
    return f'<div class="legend"><ul>{"".join(keys)}</ul><p>{said}</p></div>'


def _key(style: Style) -> str:
    width = 1.6 * style.width
    dashes = " ".join(f"{width * length:.1f}" for length in style.dashes) or "none"
    line = f'<path d="M0 5h30" stroke="var(--{style.variable})" stroke-width="{width:.1f}"'
    look = f' stroke-opacity="{style.opacity}" stroke-dasharray="{dashes}"'
    return f'<svg class="key" viewBox="0 0 30 10" aria-hidden="true">{line}{look}/></svg>'


def _panels(run: Run) -> str:
    """The drawings; the legend stands above them, or fills the place beside a tall one."""
    # the page's variables stand for the drawings' light colours: they have a dark value too
    variables = {INK[0]: "ink", GRID[0]: "grid"}
    variables |= {style.light: style.variable for style in styles_of_run(run).values()}
    figures = ""
    for number, drawing in enumerate(drawings_of(run)):
        picture = draw_inline(drawing, salt=f"{run.header['experiment']}{number}")
        for colour, name in variables.items():
            picture = picture.replace(colour, f"var(--{name})")
        kind = ' class="tall"' if drawing.is_tall else ""
        figures += f"<figure{kind}><h3>{escape(drawing.title)}</h3>{picture}</figure>"
    if ' class="tall"' in figures:
        return f'<div class="panels">{_legend(run)}{figures}</div>'
    return f'{_legend(run)}<div class="panels">{figures}</div>'


def _table(run: Run) -> str:
    """All rows, and the columns that are not empty, answers first; a method's line is before its name."""
    rows, styles = run.summary["table"], styles_of_run(run)
    columns = sorted(columns_of(rows), key=lambda column: (column != "measure", column not in ANSWERS))
    head = "".join(f"<th>{escape(label_of(HEADINGS.get(column, column)))}</th>" for column in columns)
    body = "".join(f"<tr>{''.join(_cell(key, row.get(key), styles) for key in columns)}</tr>" for row in rows)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    said = run.summary.get("notes", [])
    if "hardware" in run.summary:
        minutes = f"{run.summary['minutes']:,.1f} minutes of finished runs."
        said = [*said, f"{', '.join(run.summary['hardware'])}; {minutes}"]
    return f'<div class="wide">{table}</div>' + "".join(f"<p>{escape(note)}</p>" for note in said)


def _cell(column: str, content: object, styles: Mapping[str, Style]) -> str:
    if not isinstance(content, str):
        return f"<td>{escape(format_number(content, column))}</td>"
    style = styles.get(content)  # None for a method that is not drawn, or any other text
    shown = escape(label_of(content)) if style is None else f"{_key(style)}{escape(style.label)}"
    return f'<td title="{escape(content)}">{shown}</td>'
