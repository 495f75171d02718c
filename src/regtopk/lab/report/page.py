"""The page of a run, or of several: one HTML file that needs nothing else, in light and dark."""

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from regtopk.errors import OutputError
from regtopk.lab.report.figure import draw_files, draw_inline, drawings_of, legend_of, styles_of_run
from regtopk.lab.report.style import GRID, INK, Style, columns_of, format_number, hardware_and_time, label_of
from regtopk.lab.runs import FIGURE_PNG, FIGURE_SVG, PAGE, Run, parts_of, read_header, read_run, writing_to

# what the columns of a table are called in print, where that is not their key in summary.json
HEADINGS = {
    "measure": "",
    "bytes a step": "bytes per step",
    "test_loss": "nats per character (smaller is better)",
    "s a run": "s per run",
    "compress, %": "exchange, %",  # share of the time that selecting, coding and summing take
}
# what a reader looks for first stands beside the methods' names
ANSWERS = ("speed-up", "step", "steps", "accuracy", "test_loss", "risk", "distance", "± std")

# (on light, on dark)
PAGE_COLOURS = {
    "ground": ("#ffffff", "#14171c"), "raised": ("#f6f7f9", "#1c2027"), "quiet": ("#5b6472", "#98a2b0")
}  # fmt: skip

CSS = """
*{box-sizing:border-box}
body{margin:0;background:var(--ground);color:var(--ink);font:16px/1.55 system-ui,sans-serif}
main{max-width:72rem;margin:0 auto;padding:2.5rem 1.25rem 4rem}
h1{font-size:1.9rem;line-height:1.2;margin:0 0 .4rem;letter-spacing:-.01em;overflow-wrap:anywhere}
h2{font-size:1.3rem;margin:3rem 0 .3rem;padding-top:1.6rem;border-top:1px solid var(--grid)}
h3{font-size:.95rem;font-weight:600;margin:0 0 .4rem}
p{max-width:46rem;margin:.3rem 0 1rem;color:var(--quiet);overflow-wrap:anywhere}
.finding{max-width:60rem;color:var(--ink);font-weight:600;overflow-wrap:anywhere}
pre{background:var(--raised);border:1px solid var(--grid);border-radius:.5rem;padding:.6rem .9rem;
 white-space:pre-wrap;overflow-wrap:anywhere;font:.8rem/1.5 ui-monospace,monospace;margin:.6rem 0 1.4rem}
.panels{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(20rem,100%),1fr));gap:1.2rem}
.panels:not(:has(.tall)):has(>:nth-child(4):last-child){
 grid-template-columns:repeat(auto-fit,minmax(min(26rem,100%),1fr))}
figure{margin:0;background:var(--raised);border:1px solid var(--grid);border-radius:.75rem;padding:1rem}
.tall{grid-row:span 2}
.panels:has(.tall){grid-template-rows:auto 1fr}
@media(min-width:45rem){.panels:not(:has(.tall~.tall))>.tall{grid-area:1/-2/3/-1}}
figure svg{width:100%;height:auto;display:block;max-height:30rem}
.tall svg{max-height:none}
figure svg text{font-family:system-ui,sans-serif!important}
.legend{font-size:.9rem;margin:1rem 0 .7rem}
.panels>.legend{margin:0;grid-column:1/-2}
.panels:has(>:nth-child(5))>.legend{grid-column:auto}
.legend ul{display:flex;flex-wrap:wrap;gap:.3rem 1.3rem;margin:0 0 .6rem;padding:0;list-style:none}
.key{width:1.9rem;height:.7rem;margin-right:.45rem;vertical-align:-.05rem}
.wide{overflow-x:auto;margin:1.4rem 0}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums;font-size:.8rem}
th,td{text-align:right;padding:.4rem .35rem;border-bottom:1px solid var(--grid);white-space:nowrap}
th{font-weight:600;color:var(--quiet);white-space:normal;vertical-align:bottom}
th:first-child,td:first-child{text-align:left;padding-left:0;position:sticky;left:0;background:var(--ground)}
@media(max-width:40rem){td:first-child{white-space:normal;min-width:9rem}}
details{margin-top:1rem;color:var(--quiet);font-size:.9rem}
summary{cursor:pointer}
footer{margin-top:3rem;padding-top:1rem;border-top:1px solid var(--grid);color:var(--quiet);font-size:.85rem}
"""


def write_report(folder: Path) -> Path:
    """Draw a recorded run (or a folder of them): figure.png, figure.svg and the page, whose path is returned.

    Raises:
        OutputError: the folder holds no finished run, or one that cannot be drawn, or it cannot be written.
        MissingExtraError: matplotlib is not installed.
    """
    try:
        return _write_report(folder)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:  # records made up
        reason = f"{type(error).__name__}: {error}"
        raise OutputError(f"folder must hold a run that can be drawn, got {folder}: {reason}") from error


def _write_report(folder: Path) -> Path:
    header = read_header(folder)
    parts = parts_of(folder, header)
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
        body += [_panels(run), _table(run), _settings(run)]
    versions = " · ".join(f"{name} {version}" for name, version in header["versions"].items())
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(header['title'])}</title>\n<style>{_colours(runs)}{CSS}</style>\n</head>\n<body>\n"
        f"<main>\n{''.join(body)}\n<footer>{escape(versions)}</footer>\n</main>\n</body>\n</html>\n"
    )


def _opening(tag: str, header: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    """The title, the finding if there is one, and what the run is about."""
    finding = f"<p class=finding>{escape(summary['finding'])}</p>" if "finding" in summary else ""
    return f"<{tag}>{escape(header['title'])}</{tag}>{finding}<p>{escape(header['about'])}</p>"


def _variable(style: Style) -> str:
    return f"c{style.light[1:]}"


def _colours(runs: Sequence[Run]) -> str:
    """The page's variables: colours on light and on dark ground."""
    pairs = PAGE_COLOURS | {"ink": INK, "grid": GRID}
    for run in runs:
        pairs |= {_variable(style): (style.light, style.dark) for style in styles_of_run(run).values()}
    light, dark = ("".join(f"--{name}:{pair[n]};" for name, pair in pairs.items()) for n in (0, 1))
    return f":root{{{light}}}@media(prefers-color-scheme:dark){{:root{{{dark}}}}}"


def _legend(run: Run) -> str:
    """The methods' lines, and what there is to know of the spread."""
    styles = list(styles_of_run(run).values())
    keys = [f"<li>{_key(style)}{escape(style.label)}</li>" for style in legend_of(styles)]
    said = [_seeds(run.summary.get("results", []))]
    if len(keys) < len(styles):
        said.append("Grey: the others; the table names them, and the pointer does.")
    return f'<div class="legend"><ul>{"".join(keys)}</ul><p>{" ".join(said)}</p></div>'


def _seeds(results: Sequence[Mapping[str, Any]]) -> str:
    nums = {len(result["final"]) for result in results}
    if not nums:
        return ""
    if nums == {1}:
        return "One seed: the spread is not known, and small differences mean nothing."
    several = f"{min(nums)} to {max(nums)}" if len(nums) > 1 else f"{max(nums)}"
    return f"{several} seeds. Curves are medians and dots means over them; shades and bars are their range."


def _key(style: Style) -> str:
    """A piece of the method's line."""
    width = 1.6 * style.width
    dashes = " ".join(f"{width * length:.1f}" for length in style.dashes) or "none"
    line = f'<path d="M0 5h30" stroke="var(--{_variable(style)})" stroke-width="{width:.1f}"'
    look = f' stroke-opacity="{style.opacity}" stroke-dasharray="{dashes}"'
    return f'<svg class="key" viewBox="0 0 30 10" aria-hidden="true">{line}{look}/></svg>'


def _panels(run: Run) -> str:
    """The drawings; the legend stands above them, or fills the place beside a tall one."""
    figures = []
    styles, drawings = styles_of_run(run), drawings_of(run)
    for number, drawing in enumerate(drawings):
        picture = draw_inline(drawing, salt=f"{run.header['experiment']}{number}")
        kind = ' class="tall"' if drawing.is_tall else ""
        title = f"<h3>{escape(drawing.title)}</h3>"
        figures.append(f"<figure{kind}>{title}{_adaptive(picture, styles)}</figure>")
    if any(drawing.is_tall for drawing in drawings):
        return f'<div class="panels">{_legend(run)}{"".join(figures)}</div>'
    return f'{_legend(run)}<div class="panels">{"".join(figures)}</div>'


def _adaptive(drawing: str, styles: Mapping[str, Style]) -> str:
    """The drawing with the page's variables for its light colours: they have a dark value too."""
    names = {INK[0]: "ink", GRID[0]: "grid"} | {each.light: _variable(each) for each in styles.values()}
    for colour, name in names.items():
        drawing = drawing.replace(colour, f"var(--{name})")
    return drawing


def _table(run: Run) -> str:
    """All rows, and the columns that are not empty, answers first; a method's line is before its name."""
    rows, styles = run.summary["table"], styles_of_run(run)
    columns = sorted(columns_of(rows), key=lambda column: (column != "measure", column not in ANSWERS))
    head = "".join(f"<th>{escape(label_of(heading_of(column)))}</th>" for column in columns)
    body = "".join(f"<tr>{''.join(_cell(key, row.get(key), styles) for key in columns)}</tr>" for row in rows)
    said = [hardware_and_time(run.summary)] if "hardware" in run.summary else run.summary.get("notes", [])
    notes = "".join(f"<p>{escape(note)}</p>" for note in said)
    return (
        f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>{notes}'
    )


def _cell(column: str, content: object, styles: Mapping[str, Style]) -> str:
    if not isinstance(content, str):
        return f"<td>{escape(format_number(content, column))}</td>"
    style = styles.get(content)  # None for a method that is not drawn, or any other text
    shown = escape(label_of(content)) if style is None else f"{_key(style)}{escape(style.label)}"
    return f'<td title="{escape(content)}">{shown}</td>'


def heading_of(column: str) -> str:
    """What a column of a table is called in print."""
    return HEADINGS.get(column, column)


def _settings(run: Run) -> str:
    settings = json.dumps(run.header["config"], indent=2)
    return (
        f"<details><summary>Settings, and how to make this again</summary>"
        f"<pre>{escape(run.header['command'])}</pre><pre>{escape(settings)}</pre></details>"
    )
