// A signal that requests a dump. Python's handlers run only when the main thread runs Python code, which a
// thread that hangs in an operation does not. This handler writes to a pipe that another thread reads.
#pragma once

namespace unicomm {

// Installs the handler and returns the pipe's read end, which gets one byte per signal. Throws
// `SystemFailure` if the signal already has a handler, or if another signal was chosen before.
int listen_for_dump_signal(int number);
// For a forked child, in which the pipe belongs to the parent.
void forget_dump_signal();

}  // namespace unicomm
