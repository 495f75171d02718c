"""The page of a run, or of several: one HTML file that needs nothing else, in light and dark."""

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from regtopk.report.figure import draw_files, draw_inline, drawings_of, styles_of_run
from regtopk.report.style import GRID, INK, Style, columns_of, format_number, hardware_and_time, label_of
from regtopk.runs import FIGURE_PNG, FIGURE_SVG, PAGE, Run, read_header, read_run

LIGHT = {"ground": "#ffffff", "raised": "#f6f7f9", "quiet": "#5b6472"}
DARK = {"ground": "#14171c", "raised": "#1c2027", "quiet": "#98a2b0"}

CSS = """
*{box-sizing:border-box}
body{margin:0;background:var(--ground);color:var(--ink);font:16px/1.55 system-ui,sans-serif}
main{max-width:72rem;margin:0 auto;padding:2.5rem 1.25rem 4rem}
h1{font-size:1.9rem;line-height:1.2;margin:0 0 .4rem;letter-spacing:-.01em;overflow-wrap:anywhere}
h2{font-size:1.3rem;margin:3rem 0 .3rem;padding-top:1.6rem;border-top:1px solid var(--grid)}
h3{font-size:.95rem;font-weight:600;margin:0 0 .4rem}
p{max-width:46rem;margin:.3rem 0 1rem;color:var(--quiet)}
.finding{max-width:60rem;color:var(--ink);font-weight:600;overflow-wrap:anywhere}
pre{background:var(--raised);border:1px solid var(--grid);border-radius:.5rem;padding:.6rem .9rem;
 white-space:pre-wrap;overflow-wrap:anywhere;font:.8rem/1.5 ui-monospace,monospace;margin:.6rem 0 1.4rem}
.panels{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(20rem,100%),1fr));gap:1.2rem}
.panels:has(>:nth-child(4):last-child:not(.row)),.panels:has(>.row:nth-child(5)){
 grid-template-columns:repeat(auto-fit,minmax(min(26rem,100%),1fr))}
figure{margin:0;background:var(--raised);border:1px solid var(--grid);border-radius:.75rem;padding:1rem}
.row{grid-column:1/-1}
figure svg{width:100%;height:auto;display:block;max-height:30rem}
figure svg text{font-family:system-ui,sans-serif!important}
.legend{display:flex;flex-wrap:wrap;gap:.3rem 1.3rem;margin:1rem 0 .7rem;padding:0;list-style:none;
 font-size:.9rem}
.key{width:1.9rem;height:.7rem;margin-right:.45rem;vertical-align:-.05rem}
.wide{overflow-x:auto;margin:1.4rem 0}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums;font-size:.8rem}
th,td{text-align:right;padding:.4rem .35rem;border-bottom:1px solid var(--grid);white-space:nowrap}
th{font-weight:600;color:var(--quiet)}
th:first-child,td:first-child{text-align:left;padding-left:0}
details{margin-top:1rem;color:var(--quiet);font-size:.9rem}
summary{cursor:pointer}
footer{margin-top:3rem;padding-top:1rem;border-top:1px solid var(--grid);color:var(--quiet);font-size:.85rem}
"""


def write_report(folder: Path) -> Path:
    """Draw a recorded run (or a folder of them): figure.png, figure.svg and index.html.

    Returns:
        The page.

    Raises:
        OutputError: the folder holds no finished run.
        MissingExtraError: matplotlib is not installed.
    """
    header = read_header(folder)
    parts = [folder / part for part in header.get("parts", ())]
    for part in parts:
        write_report(part)
    runs = [read_run(part) for part in parts or [folder]]
    if not parts:
        draw_files(runs[0], folder / FIGURE_PNG, folder / FIGURE_SVG)
    page = folder / PAGE
    page.write_text(_page(header, runs), encoding="utf-8")
    return page


def _page(header: dict[str, Any], runs: Sequence[Run]) -> str:
    is_single = len(runs) == 1 and header == runs[0].header
    body = [f"<h1>{escape(header['title'])}</h1>", f"<p>{escape(header['about'])}</p>"]
    body.append(f"<pre>{escape(header['command'])}</pre>")
    for run in runs:
        if not is_single:
            body.append(f"<h2>{escape(run.header['title'])}</h2><p>{escape(run.header['about'])}</p>")
        if "finding" in run.summary:
            at = 1 if is_single else len(body)
            body.insert(at, f"<p class=finding>{escape(run.summary['finding'])}</p>")
        body += [_legend(run), _panels(run), _table(run), _settings(run)]
    versions = " · ".join(f"{name} {version}" for name, version in header["versions"].items())
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(header['title'])}</title>\n<style>{_colours(runs)}{CSS}</style>\n</head>\n<body>\n"
        f"<main>\n{''.join(body)}\n<footer>{escape(versions)}</footer>\n</main>\n</body>\n</html>\n"
    )


def _variable(style: Style) -> str:
    return f"c{style.light[1:]}"


def _colours(runs: Sequence[Run]) -> str:
    styles = [style for run in runs for style in styles_of_run(run).values()]
    light = {**LIGHT, "ink": INK[0], "grid": GRID[0]} | {_variable(style): style.light for style in styles}
    dark = {**DARK, "ink": INK[1], "grid": GRID[1]} | {_variable(style): style.dark for style in styles}
    return f":root{{{_variables(light)}}}@media(prefers-color-scheme:dark){{:root{{{_variables(dark)}}}}}"


def _variables(colours: dict[str, str]) -> str:
    return "".join(f"--{name}:{colour};" for name, colour in colours.items())


def _legend(run: Run) -> str:
    keys = [f"<li>{_key(style)}{escape(style.label)}</li>" for style in styles_of_run(run).values()]
    return f'<ul class="legend">{"".join(keys)}</ul>'


def _key(style: Style) -> str:
    """A piece of the method's line."""
    width = 1.6 * style.width
    dashes = " ".join(f"{width * length:.1f}" for length in style.dashes) or "none"
    line = f'<path d="M0 5h30" stroke="var(--{_variable(style)})" stroke-width="{width:.1f}"'
    look = f' stroke-opacity="{style.opacity}" stroke-dasharray="{dashes}"'
    return f'<svg class="key" viewBox="0 0 30 10" aria-hidden="true">{line}{look}/></svg>'


def _panels(run: Run) -> str:
    figures = []
    styles = styles_of_run(run)
    for number, drawing in enumerate(drawings_of(run)):
        picture = draw_inline(drawing, salt=f"{run.header['experiment']}{number}")
        kind = ' class="row"' if drawing.is_wide else ""
        figures.append(f"<figure{kind}><h3>{escape(drawing.title)}</h3>{_adaptive(picture, styles)}</figure>")
    return f'<div class="panels">{"".join(figures)}</div>'


def _adaptive(drawing: str, styles: Mapping[str, Style]) -> str:
    """The drawing with its light colours turned into the page's variables, which follow the reader."""
    names = {INK[0]: "ink", GRID[0]: "grid"}
    names |= {style.light: _variable(style) for style in styles.values()}
    for colour, name in names.items():
        drawing = drawing.replace(colour, f"var(--{name})")
    return drawing


def _table(run: Run) -> str:
    """All rows, and the columns that say something; methods have their line before them."""
    rows, styles = run.summary["table"], styles_of_run(run)
    columns = columns_of(rows)
    head = "".join(f"<th>{escape(_heading(column))}</th>" for column in columns)
    body = "".join(f"<tr>{''.join(_cell(row.get(key), styles) for key in columns)}</tr>" for row in rows)
    ran_on = f"<p>{escape(hardware_and_time(run.summary))}</p>" if "hardware" in run.summary else ""
    return (
        f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>{ran_on}'
    )


def _cell(content: object, styles: Mapping[str, Style]) -> str:
    if isinstance(content, str) and content in styles:
        style = styles[content]
        return f'<td title="{escape(content)}">{_key(style)}{escape(style.label)}</td>'
    if isinstance(content, str):  # a method that is not drawn, or words
        return f'<td title="{escape(content)}">{escape(label_of(content))}</td>'
    return f"<td>{escape(format_number(content))}</td>"


def _heading(column: str) -> str:
    return "" if column == "measure" else label_of(column)


def _settings(run: Run) -> str:
    settings = json.dumps(run.header["config"], indent=2)
    return (
        f"<details><summary>Settings, and how to make this again</summary>"
        f"<pre>{escape(run.header['command'])}</pre><pre>{escape(settings)}</pre></details>"
    )
