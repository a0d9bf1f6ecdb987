// The signal handler that requests a dump, and its pipe.
#include "recorder/dump_signal.hpp"

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <string>

#include "base/error.hpp"

namespace unicomm {
namespace {

std::atomic<int> write_end{-1};
int read_end = -1;
int chosen = 0;

void on_signal(int) {
    int kept = errno;
    if (int fd = write_end.load(); fd >= 0) {
        // If the pipe is full, dumps are already requested.
        [[maybe_unused]] auto written = ::write(fd, "x", 1);
    }
    errno = kept;
}

}  // namespace

int listen_for_dump_signal(int number) {
    if (chosen == number) return read_end;
    struct sigaction old{};
    if (chosen) throw SystemFailure("signal " + std::to_string(chosen) + " already asks for dumps");
    if (sigaction(number, nullptr, &old) != 0) throw_errno("signal " + std::to_string(number));
    if (old.sa_handler != SIG_DFL && old.sa_handler != SIG_IGN)
        throw SystemFailure("signal " + std::to_string(number) + " has a handler of the program's own");
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) throw_errno("no pipe for the dump signal");
    fcntl(ends[1], F_SETFL, O_NONBLOCK);
    struct sigaction action{};
    action.sa_handler = &on_signal;
    action.sa_flags = SA_RESTART;
    read_end = ends[0];
    write_end = ends[1];
    if (sigaction(number, &action, nullptr) != 0) {
        int code = errno;
        ::close(ends[0]);
        ::close(ends[1]);
        write_end = -1;
        errno = code;
        throw_errno("signal " + std::to_string(number) + " cannot ask for dumps");
    }
    chosen = number;
    return read_end;
}

void forget_dump_signal() {
    if (!chosen) return;
    ::signal(chosen, SIG_DFL);
    int fd = write_end.exchange(-1);
    ::close(fd);
    ::close(read_end);
    chosen = 0;
}

}  // namespace unicomm
