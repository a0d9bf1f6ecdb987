"""What `unicomm run` starts in tests of its end; needs no torch: launched.py FOLDER DO [ARGUMENT].

Each rank leaves its pid in FOLDER as a file. DO: raise, exit CODE, kill SIGNAL, sleep (until a signal),
stubborn (the same, and SIGTERM and SIGINT do nothing), once (raise, but not after a restart).
"""

import os
import signal
import sys
from pathlib import Path

folder, do, *more = sys.argv[1:]
rank = os.environ["RANK"]
if do == "stubborn":
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
part = Path(folder, f".{rank}")
part.write_text(str(os.getpid()))
part.rename(Path(folder, f"rank-{rank}-{os.getpid()}"))
if do == "raise" or (do == "once" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"):
    raise ValueError("at once")
if do == "exit":
    sys.exit(int(more[0]))
if do == "kill":
    os.kill(os.getpid(), signal.Signals[more[0]])
while do in ("sleep", "stubborn"):
    signal.pause()
