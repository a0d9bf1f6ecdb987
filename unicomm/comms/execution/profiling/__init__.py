"""Profiler events of operations: what torch.profiler and its traces show of them.

events.py   hooks torch.profiler's start and end; adds the events of issued operations and replays
session.py  one recording: its rows, spans and groups
"""
