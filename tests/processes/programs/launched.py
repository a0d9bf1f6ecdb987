"""What `unicomm run` starts in tests of its end; needs no torch: launched.py FOLDER DO [ARGUMENT].

Each rank leaves its pid in FOLDER as a file. DO: raise, exit CODE, kill SIGNAL, sleep (until a signal),
stubborn (the same, and SIGTERM does nothing).
"""

import os
import signal
import sys
from pathlib import Path

folder, do, *more = sys.argv[1:]
rank = os.environ["RANK"]
if do == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
part = Path(folder, f".{rank}")
part.write_text(str(os.getpid()))
part.rename(Path(folder, f"rank-{rank}-{os.getpid()}"))
if do == "raise":
    raise ValueError("at once")
if do == "exit":
    sys.exit(int(more[0]))
if do == "kill":
    os.kill(os.getpid(), signal.Signals[more[0]])
while True:
    signal.pause()
