// A signal that asks for a dump. Python's own handlers run only when the main thread runs Python code, which
// it does not while it hangs in an operation; this one writes to a pipe that another thread reads.
#pragma once

namespace unicomm {

// Installs the handler; the pipe's end to read from, one byte a signal. Throws `SystemFailure` where the
// signal has a handler already, or where another signal was chosen before.
int listen_for_dump_signal(int number);
// In a forked child: the pipe is the parent's.
void forget_dump_signal();

}  // namespace unicomm
