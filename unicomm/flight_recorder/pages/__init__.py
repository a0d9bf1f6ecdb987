"""The look of all HTML pages of unicomm: `unicomm trace analyze --html` and `unicomm profile report --html`.

A page is one file that loads nothing from the network and can be read without its scripts, but for the timeline.
Its colours, sizes and texts are checked in a browser: tests/flight_recorder/pages.

page.py       the frame of a page: header, facts, style, scripts, data
elements.py   the parts that pages share: verdicts, cards, facts, chips, tables, legends, bars
charts.py     charts as SVG drawings
page.css      the colours of the light and the dark theme, and the style of all parts
page.js       the theme switch, sorting of tables
"""
