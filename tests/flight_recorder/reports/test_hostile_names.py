"""Names in dumps are shown, and do nothing else: not to terminals, nor to Markdown, nor to tables."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from markdown_it import MarkdownIt
from typer.testing import CliRunner

from tests.flight_recorder.rings import ALL_REDUCE, META
from unicomm import _core
from unicomm.flight_recorder.reports import report_markdown
from unicomm.flight_recorder.texts import printable
from unicomm.launch.cli import app
from unicomm.launch.doctor.findings import Finding
from unicomm.launch.doctor.report import _add, _table

TERMINAL = "\x1b]0;title\x07\x1b[2J\x9b31m\r\x7f"
MARKUP = "[red]w[/nope]"
MARKDOWN = "a|b\\|`<img src=x>`](http://evil.example)![i](x)<b>\n\n# forged\n* item\n| c | d |\n```\n"
EVIL = f"{MARKUP}{TERMINAL}{MARKDOWN}\u202e\u2028"


def entry(number: int, done: bool) -> dict[str, object]:
    return {
        "record_id": number,
        "pg_id": 0,
        "process_group": ["0", EVIL],
        "collective_seq_id": number,
        "op_id": number,
        "profiling_name": f"nccl:all_reduce{EVIL}",
        "time_created_ns": 1_000_000_000 * number,
        "time_discovered_started_ns": 1_000_000_000 * number + 1000,
        "time_discovered_completed_ns": 1_000_000_000 * number + 2000 if done else None,
        "input_sizes": [[4]],
        "input_dtypes": [f"Float{EVIL}"],
        "output_sizes": [[4]],
        "output_dtypes": [f"Float{EVIL}"],
        "state": "completed" if done else f"scheduled{EVIL}",
        "frames": [{"name": f"step{EVIL}\ud800", "filename": f"/job/{EVIL}.py", "line": 7}],
        "thread_id": EVIL,
    }


def dumps(folder: Path) -> Path:
    """Dumps of two ranks, of which one has not joined the last operation; names of files are hostile, too."""
    folder.mkdir()
    config = {"0": {"name": EVIL, "desc": EVIL, "ranks": "[0, 1]"}}
    for rank in range(2):
        entries = [entry(number, number < 3) for number in range(1, 4 - rank)]
        data = {"version": "2.10", "pg_config": config, "entries": entries}
        (folder / f"rank{rank}{TERMINAL}.json").write_text(json.dumps(data))
    (folder / f"damaged{TERMINAL}[red].json").write_text("{")
    return folder


def rings(folder: Path) -> Path:
    folder.mkdir()
    meta = json.loads(META) | {"host": EVIL, "argv": [EVIL, EVIL]}
    for names in ("ops", "dtypes", "reductions"):
        meta[names] = {key: name + EVIL for key, name in meta[names].items()}
    tensor = [torch.ones(2, 3)]
    for rank in range(2):
        recorder = _core.Recorder(str(folder / f"{rank}.ucring"), json.dumps(meta), rank, 2, 64)
        comm = recorder.add_comm(name=EVIL, backend=EVIL, uid="u", ranks="0-1", rank=rank, size=2)
        for seq in range(1, 4 - rank):
            record = recorder.begin(comm, ALL_REDUCE, seq, seq, tensor, tensor, 1)
            if seq < 3:
                recorder.finish(record)
    (folder / f"damaged{TERMINAL}[red].ucring").write_text("{")
    facts = {"format": 1, "rank": 1, "pid": 1, "host": EVIL, "ended_ns": 1}
    place = {"file": f"/job/{EVIL}.py", "line": 3, "function": EVIL}
    facts["raised"] = {"type": f"E{EVIL}", "message": EVIL, "frames": [place], "consequence": False}
    (folder / "1.ending").write_text(json.dumps(facts))
    (folder / "0.stacks").write_text(
        f'Thread 0x1 (most recent call first):\n  File "{EVIL}", line 3 in {EVIL}\n'
    )
    return folder


def harmless(text: str) -> None:
    found = re.findall("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u202e\ud800-\udfff]", text)
    assert not found, f"{found[:5]!r} in {text!r}"


COMMANDS = [
    (rings, "show"),
    (rings, "show", "--raw"),
    (rings, "show", "--paths"),
    (rings, "top", "--once"),
    *((make, "analyze", *more) for make in (rings, dumps) for more in ([], ["-v"], ["--markdown", "-v"])),
    *((make, "diff") for make in (rings, dumps)),
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda words: " ".join([words[0].__name__, *words[1:]]))
def test_output_has_no_control_characters_and_all_words(command, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "2000")
    make, name, *more = command
    folder = make(tmp_path / "a")
    folders = [str(folder), str(make(tmp_path / "b"))] if name == "diff" else [str(folder)]
    if name == "diff":
        next(iter((tmp_path / "b").glob("*1*"))).unlink()
    done = CliRunner().invoke(app, ["trace", name, *folders, *more])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    assert done.exit_code in (0, 1), done.output
    harmless(done.output)
    assert MARKUP in done.output
    assert "\\x1b]0;title\\x07" in done.output.replace("\\\\", "\\")


@pytest.mark.parametrize("make", [rings, dumps])
def test_markdown_holds_no_html_and_no_links(make, tmp_path):
    done = CliRunner().invoke(app, ["trace", "analyze", str(make(tmp_path / "a")), "--markdown", "-v"])
    tokens = MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(done.output)
    kinds = [t.type for token in tokens for t in (token, *(token.children or ()))]
    assert not {"link_open", "image", "html_inline", "html_block", "fence", "code_block"} & set(kinds), kinds
    headings = [tokens[i + 1].content for i, t in enumerate(tokens) if t.type == "heading_open"]
    assert headings
    assert "forged" not in "".join(headings)
    rows: list[int] = []
    for token in tokens:
        if token.type == "tr_open":
            rows.append(0)
        elif token.type in ("td_open", "th_open"):
            rows[-1] += 1
    assert set(rows) <= {2, 3, 8}, rows
    assert "strong_open" not in kinds


@pytest.mark.parametrize(
    "name",
    [
        *(
            "a|b",
            "a\\|b",
            "a\\",
            "`",
            "``",
            "a`b`",
            "<b>",
            "](x)",
            "*a*",
            "__init__",
            "&lt;",
            "~~a~~",
            "a\nb",
        ),
        *(
            "# h",
            "- i",
            "+ i",
            "1. i",
            "1) i",
            "> q",
            "===",
            "---",
            "    code",
            "$a$",
            "![i](x)",
            "a ` b | c",
        ),
    ],
)
def test_a_name_reads_in_markdown_as_it_is(name):
    read = MarkdownIt("commonmark").enable(["table", "strikethrough"])

    def text(tokens):
        return "".join(t.content for token in tokens for t in token.children or () if not t.hidden)

    shown = printable(name).strip()
    balanced = re.fullmatch(r"[^`]*`[^`]+`[^`]*", shown) is not None
    for line in (report_markdown._prose(name), f"- {report_markdown._prose(name)}"):
        tokens = read.parse(f"{line}\n\nnext\n")
        assert [t.type for t in tokens if t.type.endswith("_open")][-1] == "paragraph_open"
        assert text(tokens) == (shown.replace("`", "") if balanced else shown) + "next"
    for make in (report_markdown._cell, report_markdown._code_cell):
        tokens = read.parse(f"| k | v |\n|---|---|\n| {make(name)} | last |\n")
        cells = [tokens[i + 1] for i, t in enumerate(tokens) if t.type == "td_open"]
        assert [text([cell]).strip() for cell in cells] == [shown, "last"]


def test_words_of_all_languages_stay_as_they_are():
    for name in (
        "gr\u00f6\u00dfe [\u03b1]",
        "\u65e5\u672c\u3000\u8a9e",
        "a\u00a0b",
        "\U0001f468\u200d\U0001f680",
    ):
        assert printable(name) == name


def test_doctor_shows_control_characters(capsys):
    from dataclasses import asdict

    from rich.console import Console

    table = _table("check", "", "result")
    _add(table, asdict(Finding(EVIL, False, EVIL, EVIL + " cure")))
    Console(width=2000).print(table)
    out = capsys.readouterr().out
    harmless(out.replace("\n", ""))
    assert MARKUP in out
