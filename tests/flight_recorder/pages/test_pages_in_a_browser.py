"""Both HTML pages in a browser: contrast, width, controls, keyboard, legends, requests, in both themes."""

import base64
import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import profile_merge
from tests.browser import CHROMIUM, WHY_NOT, Browser
from tests.flight_recorder.reports.test_html import EVIL, cycle, missing_rank, table_of
from unicomm.flight_recorder.analysis.analyze import analyze
from unicomm.flight_recorder.analysis.verdict import Cause, Verdict
from unicomm.flight_recorder.corpus import KINDS
from unicomm.flight_recorder.pages.elements import element
from unicomm.flight_recorder.pages.page import page as empty_page
from unicomm.flight_recorder.reports import report_html
from unicomm.profiler import figures_html, report

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason=WHY_NOT),
    pytest.mark.processes,
    pytest.mark.timeout(240),
]
MEASURES = Path(__file__).with_name("measures.js").read_text()
PHONE, DESKTOP = 360, 1280
OPEN_ALL = "document.querySelectorAll('details').forEach(one => one.open = true)"
CORPUS = (
    ("one-killed-and-one-stopped", 8),
    ("late-and-another-stays-away", 64),
    ("stopped-inside-an-operation-of-a-mesh", 256),
    ("cycle-of-three-groups", 8),
    ("size-mismatch", 8),
    ("healthy-training", 8),
    ("always-late", 4),
)
TRACES = [name for name, _ in CORPUS] + ["killed-outside", "long-names", "two-ranks"]
PROFILES = ["profile-of-4", "profile-of-64"]
NAMES = TRACES + PROFILES


def write_traces(folder):
    """Writes the pages, and returns their reports by name."""
    out = {}

    def write(name, report, table):
        report_html.write(report, table, folder / f"{name}.html")
        out[name] = report

    kinds = {kind.name: kind for kind in KINDS}
    for name, size in CORPUS:
        table = kinds[name].make(size, np.random.default_rng(7)).table()
        write(name, analyze(table), table)
    table = missing_rank(4, guilty=2)
    for source in table.sources:
        source.process = "killed" if source.rank == 2 else "running"
    write("killed-outside", analyze(table, stuck_after=0), table)
    table = missing_rank(4, guilty=1, name=EVIL * 3)
    found = analyze(table, stuck_after=0)
    calls = [f"/very/long/folder/of/a/program{i}.py:{i} function_{'x' * 80}" for i in range(4)]
    found.main.cause = Cause(
        "ValueError", EVIL * 4, "/very/long/folder/program0.py", 5, "x" * 80, 1, "", calls
    )
    write("long-names", found, table)
    table = table_of(cycle, 2)
    write("two-ranks", analyze(table, stuck_after=0), table)
    return out


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("pages")


@pytest.fixture(scope="module")
def reports(folder):
    return write_traces(folder)


@pytest.fixture(scope="module")
def pages(folder, reports):
    for ranks in (4, 64):
        (folder / str(ranks)).mkdir()
        traces = profile_merge.generate(folder / str(ranks), ranks, 400, 0.2, late=2)
        figures_html.write(report(traces), folder / f"profile-of-{ranks}.html")
    return folder


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("browser")) as one:
        yield one


@pytest.fixture
def show(browser, pages):
    """Opens a page, with the measures."""

    def open_page(name, width=DESKTOP, theme="light", motion=True):
        browser.look(width, 900, theme, motion)
        browser.open(pages / f"{name}.html")
        browser.run(MEASURES)
        return browser

    yield open_page
    errors, browser.errors = browser.errors, []
    assert not errors


def unreadable(browser, width, theme):
    """The texts of the open page whose contrast is below that of WCAG AA, and how many texts there are."""
    browser.run(OPEN_ALL)
    height = browser.run("document.documentElement.scrollHeight")
    browser.look(width, height, theme)
    texts = browser.run("measures.texts()")
    browser.run("measures.hideTexts()")
    picture = "data:image/png;base64," + base64.b64encode(browser.picture(whole=False)).decode()
    browser.call("Page.navigate", url="about:blank")  # whose policy allows the picture
    browser.run(MEASURES)
    browser.run(f"window.texts = {json.dumps(texts)}; 0")
    measured = browser.run(f"measures.contrasts('{picture}', window.texts)")
    low = [(m["text"], m["contrast"]) for m in measured if m["contrast"] < m["least"]]
    return low, len(measured)


@pytest.mark.parametrize("width", [DESKTOP, PHONE])
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("name", NAMES)
def test_every_text_can_be_read(show, name, theme, width):
    low, count = unreadable(show(name, width, theme), width, theme)
    assert count > 20
    assert low == []


def test_the_measure_of_contrast_finds_what_cannot_be_read(browser, tmp_path):
    """Grey on white, and dark text on stripes of which one is dark: the fault of earlier pages."""
    stripes = "background: repeating-linear-gradient(45deg, #fff 0 6px, #b3202a 6px 9px); color: #a01020"
    texts = [
        element("p", "pale text", style="background: #fff; color: #aaa"),
        element("p", "text on stripes", style=stripes),
        element("p", "half seen text", style="background: #fff; color: #333; opacity: .4"),
        element("p", "good text", style="background: #fff; color: #333"),
    ]
    path = tmp_path / "bad.html"
    path.write_text(empty_page("test", "bad", [], texts))
    browser.look(DESKTOP, 900, "light")
    browser.open(path)
    browser.run(MEASURES)
    low, _ = unreadable(browser, DESKTOP, "light")
    assert [text for text, _ in low] == ["pale text", "text on stripes", "half seen text"]


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_wider_than_a_phone(show, name):
    browser = show(name, PHONE)
    browser.run(OPEN_ALL)
    assert browser.run("document.documentElement.scrollWidth") <= PHONE
    assert browser.run("measures.beyond()") == []


@pytest.mark.parametrize("name", NAMES)
def test_each_control_does_something(show, name):
    browser = show(name)
    browser.run("window.tried = measures.enabled(); 0")  # some become disabled as others are used
    assert browser.run("tried.length") >= 2
    for i in range(browser.run("tried.length")):
        control = f"tried[{i}]"
        if browser.run(f"{control}.disabled || !{control}.checkVisibility()"):
            continue
        kind = browser.run(f"{control}.tagName.toLowerCase()")
        if kind == "summary":  # the browser opens it
            browser.run(f"{control}.click()")
            assert browser.run(f"{control}.parentElement.open")
        elif kind == "button":
            assert "click" in browser.listeners(control)
            if browser.run(f"{control}.getAttribute('aria-pressed')") == "true":
                continue  # what it shows is shown
            before = browser.run("document.documentElement.outerHTML")
            browser.run(f"{control}.click()")
            assert browser.run("document.documentElement.outerHTML") != before, browser.run(
                f"{control}.outerHTML"
            )
        elif browser.run(f"{control}.matches('.timeline')"):
            assert {"keydown", "pointerdown", "pointermove", "wheel"} <= set(browser.listeners(control))
        else:
            wider = browser.run(f"{control}.scrollWidth > {control}.clientWidth")
            higher = browser.run(f"{control}.scrollHeight > {control}.clientHeight")
            assert wider or higher, browser.run(f"{control}.outerHTML.slice(0, 99)")


@pytest.mark.parametrize("name", ["one-killed-and-one-stopped", "profile-of-64"])
def test_each_control_is_reached_by_keyboard_and_shows_that_it_is(show, name):
    browser = show(name, PHONE)
    browser.run("window.wanted = new Set(measures.enabled()); document.activeElement.blur()")
    count = browser.run("wanted.size")
    for _ in range(count + 4):
        browser.key("Tab")
        browser.run("wanted.delete(document.activeElement)")
        if browser.run("measures.controls().includes(document.activeElement)"):
            assert browser.run("getComputedStyle(document.activeElement).outlineStyle") != "none"
    assert browser.run("[...wanted].map(one => one.outerHTML.slice(0, 99))") == []


def test_the_timeline_by_keyboard(show, reports):
    browser = show("one-killed-and-one-stopped")
    browser.run("document.querySelector('.timeline').focus()")
    told = []
    for key in ("ArrowRight", "ArrowLeft", "ArrowDown"):
        browser.key(key)
        told.append(browser.run("document.querySelector('.tip').textContent"))
        assert browser.run("document.querySelectorAll('.selected').length") == 1
    first = min(rank for found in reports["one-killed-and-one-stopped"].findings for rank in found.culprits)
    assert told[0].startswith(f"rank {first}: all_reduce")
    assert told[1] != told[0]
    assert told[2].startswith(f"rank {first + 1}: ")
    assert "train.py:" in told[2]
    before = browser.run("document.querySelector('svg.rows').outerHTML")
    browser.key("Escape")
    assert browser.run("document.querySelector('.tip').hidden")
    browser.key("-")
    assert browser.run("document.querySelector('svg.rows').outerHTML") != before


def test_the_timeline_by_pointer(show):
    """Over a bar its description is shown; a drag moves the view; only with Ctrl, the wheel zooms."""
    browser = show("one-killed-and-one-stopped")
    bar = "document.querySelector('.open').getBoundingClientRect()"
    place = browser.run(f"(r => [r.x + 20, r.y + r.height / 2])({bar})")

    def mouse(kind, x, y, **more):
        browser.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    mouse("mouseMoved", *place)
    assert "all_reduce float32" in browser.run("document.querySelector('.tip').textContent")
    assert browser.run("document.querySelector('.tip').checkVisibility()")
    ticks = "[...document.querySelectorAll('.tick')].map(one => one.textContent).join()"
    before = browser.run(ticks)
    mouse("mousePressed", *place, button="left", buttons=1, clickCount=1)
    mouse("mouseMoved", place[0] + 300, place[1], button="left", buttons=1)
    mouse("mouseReleased", place[0] + 300, place[1], button="left")
    assert browser.run(ticks) != before
    assert not browser.run("document.querySelector('.tip').checkVisibility()")
    turn = (
        "(ctrlKey => { const one = new WheelEvent('wheel', {deltaY: -100, ctrlKey, cancelable: true});"
        " document.querySelector('.timeline').dispatchEvent(one); return one.defaultPrevented; })"
    )
    before = browser.run(ticks)
    assert not browser.run(f"{turn}(false)")
    assert browser.run(ticks) == before
    assert browser.run(f"{turn}(true)")
    assert browser.run(ticks) != before


@pytest.mark.parametrize("name", NAMES)
def test_legends_have_what_is_drawn(show, name):
    browser = show(name)
    assert all(drawn == keys for drawn, keys in browser.run("measures.bars()"))
    if name in PROFILES:
        assert browser.run("measures.bars().length") >= 1
        return
    views = browser.run("document.querySelectorAll('.switch button').length")
    seen = set()
    for i in range(views):
        browser.run(f"document.querySelectorAll('.switch button')[{i}].click()")
        drawn = browser.run("measures.drawn()")
        assert drawn
        assert browser.run("measures.legend()") == drawn
        seen.add(tuple(drawn))
    if name == "killed-outside":  # a culprit that has not come
        assert {"absent", "culprit", "victim", "warn", "since"} <= set().union(*seen)
    if name == "healthy-training":
        assert not {"bad", "warn", "since", "culprit", "absent"} & set().union(*seen)


def test_a_page_without_a_fault_has_no_button_for_it(show):
    browser = show("healthy-training")
    names = "measures.controls().filter(one => one.matches('button')).map(one => one.textContent)"
    assert browser.run(names) == ["Dark theme", "\u2212", "+"]
    assert browser.run("document.querySelector('.verdict.good h1').textContent").startswith("All good")
    browser = show("one-killed-and-one-stopped")
    assert browser.run(names) == ["Dark theme", "Around the fault", "Everything", "\u2212", "+"]


def test_the_second_fault_stands_under_the_first(show):
    browser = show("one-killed-and-one-stopped")
    classes = browser.run("[...document.querySelector('main').children].map(one => one.className)")
    assert classes[:2] == ["card verdict bad", "card finding bad"]
    assert "Process stopped" in browser.run("document.querySelector('.finding summary').textContent")
    top = browser.run("document.querySelector('.finding').getBoundingClientRect().bottom")
    assert top < 400


@pytest.mark.parametrize("name", ["one-killed-and-one-stopped", "profile-of-4"])
def test_the_theme_is_the_systems_until_it_is_switched(show, name):
    ground = "getComputedStyle(document.body).backgroundColor"
    light = show(name, theme="light").run(ground)
    browser = show(name, theme="dark")
    dark = browser.run(ground)
    assert light != dark
    assert browser.run("document.getElementById('theme').textContent") == "Light theme"
    browser.run("document.getElementById('theme').click()")
    assert browser.run(ground) == light
    assert browser.run("document.getElementById('theme').textContent") == "Dark theme"


def test_tables_are_sorted(show):
    browser = show("profile-of-64")
    table = "document.querySelector('[aria-label=\"All ranks\"] table')"
    column = f"[...{table}.tBodies[0].rows].map(row => row.cells[0].textContent)"
    assert browser.run(column)[0] == "rank 2"
    browser.run(f"{table}.querySelector('th button').click()")
    assert browser.run(column) == [f"rank {i}" for i in range(64)]
    assert browser.run(f"{table}.querySelector('th').ariaSort") == "ascending"
    browser.run(f"{table}.querySelector('th button').click()")
    assert browser.run(column)[0] == "rank 63"


@pytest.mark.parametrize("name", ["two-ranks", "profile-of-4"])
def test_nothing_moves_for_who_asked_for_less_motion(show, name):
    moving = (
        "[...document.querySelectorAll('*')].filter(one => ['transitionDuration', 'animationDuration']"
        ".some(key => parseFloat(getComputedStyle(one)[key]) > 0)).length"
    )
    assert show(name, motion=False).run(moving) == 0


@pytest.mark.parametrize("name", ["one-killed-and-one-stopped", "profile-of-4"])
def test_nothing_is_requested(show, browser, pages, name):
    browser.call("Network.enable")
    show(name)
    asked = [e["params"]["request"]["url"] for e in browser.events("Network.requestWillBeSent")]
    browser.call("Network.disable")
    assert asked == [(pages / f"{name}.html").as_uri()]


@pytest.mark.parametrize("name", ["one-killed-and-one-stopped", "profile-of-4"])
def test_without_scripts_all_but_the_timeline_is_there(show, browser, reports, name):
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.look(DESKTOP, 900)
        show_all = show(name)
        assert show_all.run("document.querySelectorAll('button').length") == 0
        text = show_all.run("document.querySelector('main').innerText")
    finally:
        browser.call("Emulation.setScriptExecutionDisabled", value=False)
    if name in PROFILES:
        assert "The largest delays" in text
        assert "makes the others wait" in text
    else:
        assert "needs JavaScript" in text
        assert reports[name].main.sentence in text


@pytest.mark.parametrize("name", ["long-names"])
def test_the_call_path_is_folded_under_the_place(show, name):
    browser = show(name)
    place = "document.querySelector('.verdict details.path')"
    assert "program0.py:5" in browser.run(f"{place}.querySelector('summary').textContent")
    assert not browser.run(f"{place}.querySelector('ol').checkVisibility()")
    browser.run(f"{place}.querySelector('summary').click()")
    assert browser.run(f"[...{place}.querySelectorAll('li')].map(one => one.checkVisibility())") == [True] * 4


def test_a_late_rank_is_no_culprit_where_there_is_a_fault(show, reports):
    browser = show("late-and-another-stays-away")
    bad = browser.run("[...document.querySelectorAll('.rank.bad')].map(one => one.textContent)")
    late, main = (
        reports["late-and-another-stays-away"].findings[1],
        reports["late-and-another-stays-away"].main,
    )
    assert late.verdict is Verdict.SLOW
    assert bad == [f"rank {rank}" for rank in main.culprits]
    assert late.sentence in browser.run("document.querySelector('.finding summary').innerText")
