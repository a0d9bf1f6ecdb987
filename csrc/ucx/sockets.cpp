// The sockets below an epoll file, by /proc.
#include "ucx/sockets.hpp"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <string>
#include <vector>

#include "base/clock.hpp"

namespace unicomm::ucx {
namespace {

constexpr uint64_t kPause = 1000;  // milliseconds of one poll

bool is_tcp(int file) {
    int type = 0, domain = 0;
    socklen_t size = sizeof(int);
    return getsockopt(file, SOL_SOCKET, SO_TYPE, &type, &size) == 0 && type == SOCK_STREAM &&
           getsockopt(file, SOL_SOCKET, SO_DOMAIN, &domain, &size) == 0 &&
           (domain == AF_INET || domain == AF_INET6);
}

// Adds the files that an epoll file watches; nothing for another file.
void add_watched(int epoll, std::vector<int>& found) {
    std::FILE* info = std::fopen(("/proc/self/fdinfo/" + std::to_string(epoll)).c_str(), "re");
    if (info == nullptr) return;
    char line[256];
    while (std::fgets(line, sizeof line, info) != nullptr) {
        int file = -1;
        if (std::sscanf(line, "tfd: %d", &file) == 1 &&
            std::find(found.begin(), found.end(), file) == found.end()) {
            found.push_back(file);
        }
    }
    std::fclose(info);
}

}  // namespace

int end_full_sockets(int epoll, uint64_t end) {
    std::vector<int> watched{epoll};
    for (size_t i = 0; i < watched.size(); ++i) add_watched(watched[i], watched);
    std::vector<pollfd> full;
    for (int file : watched) {
        if (is_tcp(file)) full.push_back({file, POLLOUT, 0});
    }
    while (!full.empty()) {
        const uint64_t now = now_ns();
        const int pause = now < end ? int(std::min<uint64_t>((end - now) / 1'000'000 + 1, kPause)) : 0;
        if (poll(full.data(), full.size(), pause) < 0 && errno != EINTR) return 0;
        std::erase_if(full, [](const pollfd& one) { return one.revents != 0; });
        if (now >= end) break;
    }
    for (const pollfd& one : full) ::shutdown(one.fd, SHUT_WR);
    return int(full.size());
}

}  // namespace unicomm::ucx
