"""Takes a picture of an HTML page of unicomm, for the documentation.

    unicomm trace analyze FOLDER --share --html page.html
    python -m docs.pictures.pages page.html docs/pictures/trace-page.png --height 1130

It needs Chromium.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from tests.browser import Browser


def main() -> None:
    """Parses the command line, opens the page and writes the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--width", type=int, default=1120)
    parser.add_argument("--height", type=int, default=900)
    parser.add_argument("--theme", choices=("light", "dark"), default="light")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as profile, Browser(Path(profile)) as browser:
        browser.look(options.width, options.height, options.theme)
        browser.open(options.page.resolve())
        options.picture.write_bytes(browser.picture(whole=False))


if __name__ == "__main__":
    main()
