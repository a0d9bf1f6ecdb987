// Creates and opens memfds.
#include "shm/memory/shared_file.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "base/error.hpp"

namespace unicomm::shm {
namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

[[noreturn]] void close_and_throw(int fd, const std::string& what) {
    int code = errno;
    close(fd);
    errno = code;
    throw_errno(what);
}

}  // namespace

int make_shared_file(const char* name, const std::string& what, uint64_t bytes) {
    int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0) throw_errno("cannot create the " + what + " (memfd_create)");
    // For this user only, even if others may look into this process.
    if (fchmod(fd, 0600) != 0) close_and_throw(fd, "cannot make the " + what + " private");
    if (ftruncate(fd, static_cast<off_t>(bytes)) != 0) close_and_throw(fd, "cannot size the " + what);
    if (fcntl(fd, F_ADD_SEALS, kSeals) != 0) close_and_throw(fd, "cannot seal the " + what);
    return fd;
}

int open_shared_file(int pid, int fd, bool writable, const std::string& what, uint64_t& bytes) {
    std::string who = what + " of process " + std::to_string(pid);
    std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(fd);
    char target[64] = "";
    if (readlink(path.c_str(), target, sizeof target - 1) < 0) throw_errno("cannot open the " + who);
    std::string strange = "process " + std::to_string(pid) + " offered something that is no " + what;
    if (std::string(target).rfind("/memfd:unicomm", 0) != 0) throw SystemFailure(strange);
    int flags = (writable ? O_RDWR : O_RDONLY) | O_CLOEXEC | O_NONBLOCK | O_NOCTTY;
    int mine = open(path.c_str(), flags);
    if (mine < 0) throw_errno("cannot open the " + who);
    struct stat info{};
    // The name may be forged, and the descriptor may have been reused.
    bool good = fstat(mine, &info) == 0 && S_ISREG(info.st_mode) &&
                (fcntl(mine, F_GET_SEALS) & kSeals) == kSeals && fcntl(mine, F_GET_SEALS) > 0;
    if (!good) {
        close(mine);
        throw SystemFailure(strange);
    }
    bytes = static_cast<uint64_t>(info.st_size);
    return mine;
}

}  // namespace unicomm::shm
