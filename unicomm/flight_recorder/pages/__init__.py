"""The look of the HTML pages of `unicomm trace analyze --html` and `unicomm profile report --html`.

A page is one file that loads nothing from the network. Without its scripts, only the timeline is missing.
Its contrast, widths and controls are checked in a browser: tests/flight_recorder/pages.

page.py       the frame of a page: header, facts, style, scripts, data
elements.py   the parts that pages share: verdicts, cards, facts, chips, tables, legends, bars
charts.py     charts as SVG drawings
page.css      the colours of the light and the dark theme, and the style of all parts
page.js       the theme switch, sorting of tables
"""
