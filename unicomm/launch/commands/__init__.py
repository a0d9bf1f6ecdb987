"""The subcommands of `unicomm`, one file each, and what the larger ones do.

run.py              unicomm run, whose options torchrun's parser reads
rehearse.py         unicomm rehearse
bench.py            unicomm bench
doctor.py           unicomm doctor
trace.py            unicomm trace: show, analyze, selftest
trace_top.py        unicomm trace top
trace_diff.py       unicomm trace diff
trace_export.py     unicomm trace export
trace_actions.py    what analyze and selftest do
profile.py          unicomm profile: merge, report, annotate
build.py            unicomm build: optional parts that need a compiler
terminal.py         what the commands share: plain groups, exit codes, errors, progress

The modules with options import neither torch nor numpy, so that `--help` is fast; each command imports what
it needs when it runs.
"""
