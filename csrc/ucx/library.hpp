// An opened libucp, with the functions that it has.
#pragma once
#include <string>
#include <type_traits>
#include <vector>

#include "base/dynamic_library.hpp"
#include "ucx/abi.hpp"

namespace unicomm::ucx {

struct Functions {
#define UNICOMM_UCX_MEMBER(name, since, ...) std::type_identity_t<__VA_ARGS__>* name = nullptr;
    UNICOMM_UCP_FUNCTIONS(UNICOMM_UCX_MEMBER)
    UNICOMM_UCS_FUNCTIONS(UNICOMM_UCX_MEMBER)
#undef UNICOMM_UCX_MEMBER
};

class Library {
  public:
    // Opens `path` as dlopen does; with `loaded_only` only if it is already in the process. Throws
    // SystemFailure if it cannot be opened, is no UCX, or is older than `kOldest`.
    //
    // UCX installs handlers of fatal signals, and of SIGHUP, when it is loaded, unless the environment
    // forbids it. It does not here, as unicomm's own records of crashes and Python's faulthandler need
    // theirs; a user's own variables are obeyed.
    Library(const std::string& path, bool loaded_only);
    Library(const Library&) = delete;
    Library& operator=(const Library&) = delete;
    // Never closed: threads of the library may outlive every communicator.

    const Functions& operator()() const { return functions_; }
    int version() const { return version_; }
    int release() const { return release_; }
    // The file that it was loaded from.
    const std::string& file() const { return file_; }
    std::vector<KnownFunction> known() const;
    std::string text(Status status) const;
    // Set when UCX lacks memory in this thread, cleared by whoever wants to know.
    static bool& lacks_memory();

  private:
    Functions functions_;
    int version_ = 0, release_ = 0;
    std::string file_;
};

}  // namespace unicomm::ucx
