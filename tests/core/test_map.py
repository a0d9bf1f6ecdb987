"""csrc/README.md names every file of the native core, under its folder."""

import re
from pathlib import Path

CSRC = Path(__file__).parent.parent.parent / "csrc"


def test_the_map_names_every_file():
    folder, named = None, set()
    for line in (CSRC / "README.md").read_text().splitlines():
        if heading := re.fullmatch(r"## (\S+)/", line):
            folder = heading[1]
        elif entry := re.match(r"- ((?:`[^`]+`(?:, )?)+)", line):
            named |= {f"{folder}/{name}" for name in re.findall(r"`([^`]+)`", entry[1])}
    files = (path for path in CSRC.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    assert named == {str(path.relative_to(CSRC)) for path in files} - {"README.md"}


def test_a_folder_is_seen_at_a_glance():
    folders = [path for path in CSRC.rglob("*") if path.is_dir() and path.name != "__pycache__"]
    assert {path.name: n for path in folders if (n := sum(p.is_file() for p in path.iterdir())) > 16} == {}
