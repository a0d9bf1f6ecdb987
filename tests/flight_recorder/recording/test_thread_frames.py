"""Frames of threads, asked for while threads end and memory is collected."""

import gc
import sys
import threading

from unicomm.flight_recorder.recording.thread_frames import frames_of_threads


def test_nothing_is_collected_meanwhile(monkeypatch):
    seen = []
    frames = sys._current_frames
    monkeypatch.setattr(sys, "_current_frames", lambda: seen.append(gc.isenabled()) or frames())
    assert threading.get_ident() in frames_of_threads()
    assert seen == [False]
    assert gc.isenabled()
    gc.disable()
    try:
        frames_of_threads()
        assert not gc.isenabled()
    finally:
        gc.enable()
