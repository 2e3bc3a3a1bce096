"""The report in a headless browser: at the widths of a phone and of a large screen, in light and dark mode, and printed.

A page of the test has the unchanged reports in frames. Its script measures the frames and writes the results to the DOM
of the page, which the browser prints.
"""

import json
import re
import shutil
import subprocess
from html import escape, unescape
from pathlib import Path
from typing import Any

import pytest

from compliance.report.page import render
from compliance.report.results import load_results
from tests.compliance.result_folders import write_closed_folder, write_experiments, write_failing_folder
from tests.conftest import REPOSITORY

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome to look at the page with")

WIDTHS = (320, 400, 1600)
SCHEMES = {"dark": 0, "light": 1}
MIN_CONTRAST = 4.5
"""Minimum contrast of text against its background, by WCAG 2.2, 1.4.3."""

MEASURE = """
const luminance = ([r, g, b]) => {
  const [x, y, z] = [r, g, b].map(c => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  return 0.2126 * x + 0.7152 * y + 0.0722 * z;
};
const numbers = colour => (colour.match(/[\\d.]+/g) || []).map(Number);
const background = (element, style) => {
  for (; element; element = element.parentElement) {
    const [r, g, b, a = 1] = numbers(style(element).backgroundColor);
    if (a > 0.5) return [r, g, b];
  }
  return [NaN, NaN, NaN];
};
const contrast = (element, style) => {
  const pair = [luminance(numbers(style(element).color)), luminance(background(element, style))].sort((a, b) => a - b);
  return (pair[1] + 0.05) / (pair[0] + 0.05);
};
const named = element => `${element.tagName}.${element.className}: ${element.textContent.slice(0, 40)}`;
const overlapping = (elements) => {
  const boxes = elements.map(element => element.getBoundingClientRect());
  return boxes.filter((box, n) => n && box.left < boxes[n - 1].right && box.top < boxes[n - 1].bottom).length;
};
function measure(frame) {
  const page = frame.contentDocument, style = element => frame.contentWindow.getComputedStyle(element);
  const all = [...page.body.querySelectorAll('*')];
  const shown = all.filter(element => element.getClientRects().length && style(element).visibility === 'visible');
  const texts = shown.filter(element => [...element.childNodes].some(node => node.nodeType === 3 && node.data.trim()));
  const read = texts.filter(element => !element.closest('.spoken'));
  const outside = shown.filter(element => !element.closest('.scroll') && !element.closest('svg')
    && element.getBoundingClientRect().right > page.documentElement.clientWidth + 0.5);
  return {
    width: page.documentElement.clientWidth,
    scroll_width: page.documentElement.scrollWidth,
    outside: outside.map(named),
    pale: read.map(e => [contrast(e, style), named(e)]).filter(([ratio]) => !(ratio >= MIN_CONTRAST)),
    small: read.filter(element => parseFloat(style(element).fontSize) < 11.5).map(named),
    crowded: [...page.querySelectorAll('.plot')].map(plot => overlapping([...plot.querySelectorAll('.x')])),
    charts: [...page.querySelectorAll('.plot svg')].map(svg => [svg.clientWidth, svg.clientHeight]),
    paper: luminance(background(page.body, style)),
    cut: [...page.querySelectorAll('.bar span')].filter(part => part.scrollWidth > part.clientWidth).map(named),
  };
}
addEventListener('load', () => {
  const found = {};
  for (const frame of document.querySelectorAll('iframe')) found[frame.name] = measure(frame);
  document.querySelector('pre').textContent = JSON.stringify(found);
});
"""


def browse(page: Path, text: str, action: str = "--dump-dom", scheme: str = "light") -> tuple[str, str]:
    """Write a page, open it in the browser, and return the browser's output and the page's console messages."""
    assert BROWSER is not None
    page.write_text(text)
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
        f"--user-data-dir={page.parent / 'profile'}", f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}",
        "--enable-logging=stderr", "--virtual-time-budget=10000", action, page.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Make reports of the committed results, of ten runs in the closed division, and of runs with failures."""
    root = tmp_path_factory.mktemp("folders")
    folders = {
        "tiny": REPOSITORY / "results/cpu_2cores/bert",
        "closed": write_closed_folder(root / "closed"),
        "failing": write_failing_folder(root / "failing"),
        "experiments": write_experiments(root / "experiments"),
    }
    return {name: render(load_results(folder)) for name, folder in folders.items()}


@pytest.fixture(scope="module")
def measured(pages: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Return the measurements by colour scheme, then by the name and the width of the report, as in ``name width``."""
    frames = "".join(
        f'<iframe name="{name} {width}" width="{width}" height="900" srcdoc="{escape(text)}"></iframe>'
        for name, text in pages.items()
        for width in WIDTHS
    )
    page = '<!doctype html><html style="color-scheme: light dark"><meta charset="utf-8"><pre></pre>'
    page += f"<script>{MEASURE.replace('MIN_CONTRAST', str(MIN_CONTRAST))}</script>{frames}</html>"
    found = {}
    for scheme in SCHEMES:
        dom, complaints = browse(tmp_path_factory.mktemp("measured") / "page.html", page, scheme=scheme)
        assert complaints == ""
        found[scheme] = json.loads(unescape(dom.partition("<pre>")[2].partition("</pre>")[0]))
    return found


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["tiny", "closed", "failing", "experiments"])
def test_the_report_fits_the_screen_and_is_readable(measured: dict[str, dict[str, Any]], name: str, width: int) -> None:
    for scheme, found in measured.items():
        page = found[f"{name} {width}"]
        assert page["width"] == width
        assert page["scroll_width"] <= width, page["outside"]
        assert page["outside"] == []
        assert page["small"] == page["cut"] == []
        assert page["pale"] == [], scheme
        assert not any(page["crowded"])
        assert (page["paper"] > 0.8) if scheme == "light" else (page["paper"] < 0.05)
        room = width - 120 if width < 1000 else 380
        assert all(chart[0] >= room and chart[1] >= 150 for chart in page["charts"]), page["charts"]


def test_the_content_security_policy_blocks_an_injected_script(pages: dict[str, str], tmp_path: Path) -> None:
    infected = pages["tiny"].replace("</body>", "<script>document.title = 'it ran'</script></body>")
    dom, complaints = browse(tmp_path / "page.html", infected)
    assert "<title>BERT on cpu_2cores</title>" in dom
    assert "Content Security Policy" in complaints


def test_the_report_prints_on_2_to_8_pages(pages: dict[str, str], tmp_path: Path) -> None:
    printed = tmp_path / "page.pdf"
    _, complaints = browse(tmp_path / "page.html", pages["closed"], f"--print-to-pdf={printed}", scheme="dark")
    assert complaints == ""
    assert 2 <= len(re.findall(rb"/Type /Page\b(?!s)", printed.read_bytes())) <= 8
