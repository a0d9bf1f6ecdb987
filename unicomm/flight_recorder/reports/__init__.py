"""Rings, reports and differences as text, JSON, Markdown, an HTML page and a Perfetto trace.

rings_text.py        `unicomm trace show`: the rings of all ranks as tables, or as JSON
report_text.py       `unicomm trace analyze`: a report on one terminal screen
report_data.py       a report as JSON, and without names of hosts and folders
report_markdown.py   a report as Markdown
report_html.py       a report as one HTML page, in the look of pages/
wait_graph_svg.py    the wait-for graph of a finding as an SVG drawing
timeline_data.py     the operations of the ranks in few bytes, for timeline.js
timeline.js          the timeline of the page
timeline.py          operations of many ranks on one clock, for drawings
perfetto.py          a report's operations as a trace for ui.perfetto.dev
diff_text.py         `unicomm trace diff`: the difference of two runs
report.schema.json   the JSON schema of report_data
"""
