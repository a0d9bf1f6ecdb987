// Memory files that processes of one user show each other: no name in any file system, private, and of a size
// that cannot change any more, so that no read of a mapping ends in SIGBUS whatever its owner does.
#pragma once
#include <cstdint>
#include <string>

namespace unicomm::shm {

// A new one of `bytes` zeros; `name` ("unicomm...") is for /proc, `what` for the error. Throws SystemFailure.
int make_shared_file(const char* name, const std::string& what, uint64_t bytes);

// What process `pid` holds as `fd`, and its size. Nothing else than such a file is ever opened: to open a
// device or a pipe may block, or do something to whoever holds its other end. Throws SystemFailure.
int open_shared_file(int pid, int fd, bool writable, const std::string& what, uint64_t& bytes);

}  // namespace unicomm::shm
