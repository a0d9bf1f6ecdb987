// Opens libucp and finds its functions.
#include "ucx/library.hpp"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "base/dynamic_library.hpp"

namespace unicomm::ucx {
namespace {

// A variable of the environment that is set while UCX is loaded, unless the user has set it.
class SetMeanwhile {
  public:
    SetMeanwhile(const char* name, const char* value) : name_(name), set_(getenv(name) == nullptr) {
        if (set_) setenv(name, value, 0);
    }
    ~SetMeanwhile() {
        if (set_) unsetenv(name_);
    }
    SetMeanwhile(const SetMeanwhile&) = delete;
    SetMeanwhile& operator=(const SetMeanwhile&) = delete;

  private:
    const char* name_;
    bool set_;
};

// UCX goes on without memory for what arrives: it tells nobody but its log, in two messages for each try, and
// what waits for the data waits for ever. Nor does the log of a communicator that has failed need a line for
// each message that was never received.
bool is_worth_a_line(int level, const char* format) {
    if (level > kWarning) return true;
    auto says = [&](const char* words) { return std::strstr(format, words) != nullptr; };
    if (says("unexpected tag-receive descriptor")) return false;
    const bool lacks = says("Failed to allocate memory pool") || says("unable to get a buffer") ||
                       says("descriptor is not allocated");
    return !lacks || !std::exchange(Library::lacks_memory(), true);
}

// Writes a line as UCX does, without memory of its own. UCX copies some words for it, and follows a null
// pointer where it cannot (ucs_strdup of UCX 1.22), and lack of memory is just what it has to tell then. Nor
// can memory be asked for here: UCX may be in its own hook of munmap, whose lock free() would wait for.
void write_line(const char* file, unsigned line, int level, const char* format, va_list values) {
    char message[768] = "", text[1024];
    std::vsnprintf(message, sizeof message, format, values);
    const char* name = level == kWarning ? "WARN" : "ERROR";
    std::snprintf(text, sizeof text, "UCX %s %s:%u: %s\n", name, file, line, message);
    [[maybe_unused]] ssize_t written = write(STDERR_FILENO, text, std::strlen(text));
}

// Returns whether UCX writes the message.
int heard(const char* file, unsigned line, const char*, int level, const void*, const char* format,
          va_list values) {
    static const bool to_file = getenv("UCX_LOG_FILE") != nullptr;
    if (!is_worth_a_line(level, format)) return 0;
    if (to_file || level > kWarning) return 1;
    write_line(file, line, level, format, values);
    return 0;
}

}  // namespace

bool& Library::lacks_memory() {
    static thread_local bool lacks = false;
    return lacks;
}

Library::Library(const std::string& path, bool loaded_only) {
    SetMeanwhile no_handlers("UCX_HANDLE_ERRORS", "none"), no_signals("UCX_ERROR_SIGNALS", "");
    SetMeanwhile no_debugger("UCX_DEBUG_SIGNO", "0");  // SIGHUP, else
    void* handle = open_library(path, loaded_only);
#define UNICOMM_UCX_FIND(name, since, ...) \
    functions_.name = reinterpret_cast<std::type_identity_t<__VA_ARGS__>*>(dlsym(handle, #name));
    UNICOMM_UCP_FUNCTIONS(UNICOMM_UCX_FIND)
    UNICOMM_UCS_FUNCTIONS(UNICOMM_UCX_FIND)
#undef UNICOMM_UCX_FIND
    if (functions_.ucp_get_version == nullptr) throw SystemFailure(path + " is no UCX: no ucp_get_version");
    unsigned major = 0, minor = 0, release = 0;
    functions_.ucp_get_version(&major, &minor, &release);
    version_ = version_code(int(major), int(minor));
    release_ = int(release);
    file_ = file_of(reinterpret_cast<void*>(functions_.ucp_get_version), path);
    std::string title = file_ + " (UCX " + std::to_string(major) + "." + std::to_string(minor) + ")";
    if (version_ < kOldest) throw SystemFailure(title + " is older than UCX 1.10");
    for (const KnownFunction& known : this->known()) {
        if (!known.there && known.since <= kOldest) throw SystemFailure(title + " has no " + known.name);
    }
    functions_.ucs_log_push_handler(&heard);
}

std::vector<KnownFunction> Library::known() const {
    return {
#define UNICOMM_UCX_KNOWN(name, since, ...) {#name, since, functions_.name != nullptr},
        UNICOMM_UCP_FUNCTIONS(UNICOMM_UCX_KNOWN) UNICOMM_UCS_FUNCTIONS(UNICOMM_UCX_KNOWN)
#undef UNICOMM_UCX_KNOWN
    };
}

std::string Library::text(Status status) const { return functions_.ucs_status_string(status); }

}  // namespace unicomm::ucx
