// Memory files that processes of one user share. They have no name in a file system, are private, and cannot
// change their size, so that no access to a mapping ends in SIGBUS whatever the owner does.
#pragma once
#include <cstdint>
#include <string>

namespace unicomm::shm {

// Creates a file of `bytes` zeros. `name` ("unicomm...") appears in /proc, `what` in errors. Throws
// SystemFailure.
int make_shared_file(const char* name, const std::string& what, uint64_t bytes);

// Opens what process `pid` holds as `fd`, and returns its size in `bytes`. Only opens such a file: opening a
// device or a pipe may block, or affect whoever holds its other end. Throws SystemFailure.
int open_shared_file(int pid, int fd, bool writable, const std::string& what, uint64_t& bytes);

}  // namespace unicomm::shm
