// Forks, and reads what the child says from a pipe.
#include "tests/simulation/isolated.hpp"

#include <signal.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <stdexcept>

namespace unicomm::simulation {
namespace {

// Ends this process after so much time of a core: a busy machine may leave it none for long.
void limit(unsigned seconds) {
    itimerval timer{{0, 0}, {long(seconds), 0}};
    setitimer(ITIMER_PROF, &timer, nullptr);
}

}  // namespace

Answer isolated(const std::function<void(const std::function<void(const std::string&)>&)>& body,
                unsigned seconds) {
    int ends[2];
    if (pipe(ends) != 0) throw std::runtime_error("no pipe");
    pid_t child = fork();
    if (child < 0) throw std::runtime_error("no process");
    if (child == 0) {
        close(ends[0]);
        limit(seconds);
        body([&](const std::string& text) {
            limit(seconds);
            for (size_t at = 0; at < text.size();) {
                ssize_t wrote = write(ends[1], text.data() + at, text.size() - at);
                if (wrote <= 0) _exit(3);
                at += size_t(wrote);
            }
        });
        _exit(0);
    }
    close(ends[1]);
    Answer answer;
    char part[65536];
    for (ssize_t got; (got = read(ends[0], part, sizeof part)) > 0;) answer.text.append(part, size_t(got));
    close(ends[0]);
    int status = 0;
    waitpid(child, &status, 0);
    answer.whole = WIFEXITED(status) && WEXITSTATUS(status) == 0;
    if (WIFSIGNALED(status)) {
        answer.ended = WTERMSIG(status) == SIGPROF ? "it ran on without reaching a point"
                                                   : std::string("signal: ") + strsignal(WTERMSIG(status));
    } else if (!answer.whole) {
        answer.ended = "exit code " + std::to_string(WEXITSTATUS(status));
    }
    return answer;
}

}  // namespace unicomm::simulation
