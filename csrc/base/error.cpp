// Errors of the operating system as exceptions.
#include "base/error.hpp"

#include <cerrno>
#include <cstring>

namespace unicomm {

void throw_errno(const std::string& what) {
    int code = errno;
    throw SystemFailure(what + ": " + std::strerror(code), code);
}

bool SystemFailure::is_want() const { return number == ENOMEM || number == EMFILE || number == ENFILE; }

}  // namespace unicomm
