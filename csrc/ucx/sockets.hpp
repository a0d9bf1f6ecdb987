// The TCP sockets of a worker, which UCX does not tell.
#pragma once
#include <cstdint>

namespace unicomm::ucx {

// Waits until the system takes data again on all TCP sockets below an epoll file, and below those in it, and
// ends the sending side of those whose buffers are still full at `end`, by now_ns(). What their buffers hold
// is sent nevertheless. Returns how many it has ended.
int end_full_sockets(int epoll, uint64_t end);

}  // namespace unicomm::ucx
