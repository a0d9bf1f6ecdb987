// A communicator's options, in the layout that the opened library and this file share.
#pragma once
#include <cstddef>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "nccl/abi.hpp"

namespace unicomm::nccl {

struct Field {
    const char* name;
    size_t offset;
    bool text;
    int since;  // version of NCCL that introduced it
};
const std::vector<Field>& config_fields();

// Returns the bytes of ncclConfig_t in that version of NCCL.
size_t config_bytes(int version);

using Setting = std::pair<std::string, std::variant<int, std::string>>;

// An ncclConfig_t with these settings. It claims the older of the library's version and ours: a library
// resets fields that are newer than the claim, and uses all older fields. Holds the texts that it points to.
class FilledConfig {
  public:
    // Throws std::invalid_argument for an unknown name, a value of the wrong type, or a field that the
    // library is too old for.
    FilledConfig(int library_version, const std::vector<Setting>& settings);
    FilledConfig(const FilledConfig&) = delete;
    FilledConfig& operator=(const FilledConfig&) = delete;
    Config* get() { return &config_; }

  private:
    Config config_;
    std::vector<std::string> texts_;
};

}  // namespace unicomm::nccl
