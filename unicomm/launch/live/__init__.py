"""Live ranks: worker processes that run one call after the other (unicomm.launch.notebook is the face).

    ranks.py    launch, Ranks: what the user holds       run.py      one call, until all have answered
    process.py  a worker's process, and who listens to it  worker.py   the worker itself
    channel.py  what the two say to each other           output.py   lines of all ranks on one screen
    errors.py   how ranks fail

docs/design/notebook.md says why they are processes of their own.
"""
