// The communicator's options, laid out as the library at hand and we both know them.
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
    int since;  // version of NCCL
};
const std::vector<Field>& config_fields();

// Bytes of ncclConfig_t in that version of NCCL.
size_t config_bytes(int version);

using Setting = std::pair<std::string, std::variant<int, std::string>>;

// A struct with these settings. It claims the older of the library's version and ours, for a library resets
// what is newer than the claim, and takes what is older for meant. Holds the texts that it points to.
class FilledConfig {
  public:
    // Throws std::invalid_argument for a name that there is not, a value of the wrong kind, and a field that
    // the library is too old for.
    FilledConfig(int library_version, const std::vector<Setting>& settings);
    FilledConfig(const FilledConfig&) = delete;
    FilledConfig& operator=(const FilledConfig&) = delete;
    Config* get() { return &config_; }

  private:
    Config config_;
    std::vector<std::string> texts_;
};

}  // namespace unicomm::nccl
