// An opened NCCL or RCCL, with the functions that it has.
#pragma once
#include <string>
#include <type_traits>
#include <vector>

#include "base/dynamic_library.hpp"
#include "nccl/abi.hpp"

namespace unicomm::nccl {

struct Functions {
#define UNICOMM_NCCL_MEMBER(name, since, ...) std::type_identity_t<__VA_ARGS__>* name = nullptr;
    UNICOMM_NCCL_FUNCTIONS(UNICOMM_NCCL_MEMBER)
#undef UNICOMM_NCCL_MEMBER
};

class Library {
  public:
    // Opens `path` as dlopen does; with `loaded_only` only if it is already in the process. Throws
    // SystemFailure if it cannot be opened or is no such library.
    Library(const std::string& path, bool loaded_only);
    Library(const Library&) = delete;
    Library& operator=(const Library&) = delete;
    // Never closed: threads of the library may outlive every communicator.

    const Functions& operator()() const { return functions_; }
    int version() const { return version_; }
    // The file that it was loaded from.
    const std::string& file() const { return file_; }
    std::vector<KnownFunction> known() const;

  private:
    Functions functions_;
    int version_ = 0;
    std::string file_;
};

}  // namespace unicomm::nccl
