// Fields of ncclConfig_t.
#include "nccl/config.hpp"

#include <algorithm>
#include <climits>
#include <cstring>
#include <stdexcept>

namespace unicomm::nccl {

const std::vector<Field>& config_fields() {
#define UNICOMM_NCCL_FIELD(name, text, major, minor)                    \
    {                                                                   \
        #name, offsetof(Config, name), text, version_code(major, minor) \
    }
    static const std::vector<Field> fields{
        UNICOMM_NCCL_FIELD(blocking, false, 2, 14),
        UNICOMM_NCCL_FIELD(cgaClusterSize, false, 2, 17),
        UNICOMM_NCCL_FIELD(minCTAs, false, 2, 17),
        UNICOMM_NCCL_FIELD(maxCTAs, false, 2, 17),
        UNICOMM_NCCL_FIELD(netName, true, 2, 17),
        UNICOMM_NCCL_FIELD(splitShare, false, 2, 18),
        UNICOMM_NCCL_FIELD(trafficClass, false, 2, 26),
        UNICOMM_NCCL_FIELD(commName, true, 2, 27),
        UNICOMM_NCCL_FIELD(collnetEnable, false, 2, 27),
        UNICOMM_NCCL_FIELD(CTAPolicy, false, 2, 27),
        UNICOMM_NCCL_FIELD(shrinkShare, false, 2, 27),
        UNICOMM_NCCL_FIELD(nvlsCTAs, false, 2, 27),
        UNICOMM_NCCL_FIELD(nChannelsPerNetPeer, false, 2, 28),
        UNICOMM_NCCL_FIELD(nvlinkCentricSched, false, 2, 28),
        UNICOMM_NCCL_FIELD(graphUsageMode, false, 2, 29),
        UNICOMM_NCCL_FIELD(numRmaCtx, false, 2, 29),
        UNICOMM_NCCL_FIELD(maxP2pPeers, false, 2, 30),
        UNICOMM_NCCL_FIELD(graphStreamOrdering, false, 2, 31),
        UNICOMM_NCCL_FIELD(launchOrderImplicit, false, 2, 31),
        UNICOMM_NCCL_FIELD(numRmaSig, false, 2, 31),
        UNICOMM_NCCL_FIELD(rmaEagerInit, false, 2, 31),
        UNICOMM_NCCL_FIELD(hostCftMode, false, 2, 31),
        UNICOMM_NCCL_FIELD(nvlsHostMode, false, 2, 31),
    };
#undef UNICOMM_NCCL_FIELD
    return fields;
}

size_t config_bytes(int version) {
    size_t end = offsetof(Config, blocking);
    for (const Field& field : config_fields()) {
        if (field.since <= version) end = field.offset + (field.text ? sizeof(char*) : sizeof(int));
    }
    return (end + alignof(Config) - 1) / alignof(Config) * alignof(Config);
}

FilledConfig::FilledConfig(int library_version, const std::vector<Setting>& settings) {
    std::memset(&config_, 0, sizeof config_);
    char* raw = reinterpret_cast<char*>(&config_);
    const int unset = INT_MIN;
    for (const Field& field : config_fields()) {
        if (!field.text) std::memcpy(raw + field.offset, &unset, sizeof unset);
    }
    const int version = std::min(library_version, kNewestConfig);
    config_.size = config_bytes(version);
    config_.magic = kMagic;
    config_.version = static_cast<uint32_t>(version);
    texts_.reserve(settings.size());  // their addresses must not change
    for (const auto& [name, value] : settings) {
        const auto& fields = config_fields();
        auto field =
            std::find_if(fields.begin(), fields.end(), [&](const Field& f) { return name == f.name; });
        if (field == fields.end()) throw std::invalid_argument("ncclConfig_t has no field " + name);
        if (field->since > library_version) throw std::invalid_argument("the library is too old for " + name);
        if (field->text != std::holds_alternative<std::string>(value))
            throw std::invalid_argument(name + (field->text ? " is a text" : " is a number"));
        if (field->text) {
            const char* text = texts_.emplace_back(std::get<std::string>(value)).c_str();
            std::memcpy(raw + field->offset, &text, sizeof text);
        } else {
            std::memcpy(raw + field->offset, &std::get<int>(value), sizeof(int));
        }
    }
}

}  // namespace unicomm::nccl
