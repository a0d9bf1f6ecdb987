// ncclConfig_t as the library reads it: its size, its magic, its version.
#include <cstring>
#include <string>

#include "comm.hpp"

namespace mock_nccl {
namespace {

struct Field {
    const char* name;
    size_t offset;
    int since;  // the library's version that brought it
    int lowest, highest;
    bool text = false;
};
#define INT(name, since, lowest, highest) {#name, offsetof(Config, name), since, lowest, highest}
#define TEXT(name, since) {#name, offsetof(Config, name), since, 0, 0, true}
constexpr Field kFields[] = {
    INT(blocking, 21400, 0, 1),
    INT(cgaClusterSize, 21700, 0, INT_MAX),
    INT(minCTAs, 21700, 1, INT_MAX),
    INT(maxCTAs, 21700, 1, INT_MAX),
    TEXT(netName, 21700),
    INT(splitShare, 21800, 0, 1),
    INT(trafficClass, 22500, INT_MIN, INT_MAX),
    TEXT(commName, 22700),
    INT(collnetEnable, 22700, 0, 1),
    INT(CTAPolicy, 22700, 0, 3),
    INT(shrinkShare, 22700, 0, 1),
    INT(nvlsCTAs, 22700, 1, INT_MAX),
    INT(nChannelsPerNetPeer, 22800, 1, INT_MAX),
    INT(nvlinkCentricSched, 22800, 0, 1),
    INT(graphUsageMode, 22900, 0, 2),
    INT(numRmaCtx, 22900, 1, INT_MAX),
    INT(maxP2pPeers, 23000, 1, INT_MAX),
    INT(graphStreamOrdering, 23100, 0, 1),
    INT(launchOrderImplicit, 23100, 0, 1),
    INT(numRmaSig, 23100, 1, INT_MAX),
    INT(rmaEagerInit, 23100, 0, 1),
    INT(hostCftMode, 23100, 1, 3),
    INT(nvlsHostMode, 23100, 0, INT_MAX),
};
#undef INT
#undef TEXT

// How long the structure was in a library of this version.
size_t size_of_config(int library) {
    if (library >= 23100) return 120;
    if (library >= 23000) return 96;
    if (library >= 22900) return 88;
    if (library >= 22800) return 80;
    return library >= 22700 ? 72 : 48;
}

int& int_of(Config& config, const Field& field) {
    return *reinterpret_cast<int*>(reinterpret_cast<char*>(&config) + field.offset);
}

void reset(Config& config, const Field& field) {
    if (field.text)
        *reinterpret_cast<const char**>(reinterpret_cast<char*>(&config) + field.offset) = nullptr;
    else
        int_of(config, field) = kUndefined;
}

}  // namespace

Settings default_settings() {
    Settings s;
    memset(&s.fields, 0, sizeof s.fields);
    for (const Field& field : kFields) reset(s.fields, field);
    return s;
}

bool read_settings(const Config* given, const Settings& inherited, Settings* settings, std::string* error) {
    if (!given) {
        *settings = inherited;
        return true;
    }
    *settings = default_settings();
    Config& c = settings->fields;
    if (given->size < offsetof(Config, blocking)) {
        *error = "config: a size of " + std::to_string(given->size) + " bytes holds no field";
        return false;
    }
    memcpy(&c, given, std::min(given->size, size_of_config(version())));
    if (c.magic != kMagic) {
        *error = "config: not made by NCCL_CONFIG_INITIALIZER (wrong magic)";
        return false;
    }
    for (const Field& field : kFields) {
        if (static_cast<int>(c.version) < field.since || version() < field.since) reset(c, field);
        if (field.text || int_of(c, field) == kUndefined) continue;
        int value = int_of(c, field);
        if (value < field.lowest || value > field.highest) {
            *error = std::string("config: ") + field.name + " cannot be " + std::to_string(value);
            return false;
        }
    }
    if (c.minCTAs != kUndefined && c.maxCTAs != kUndefined && c.minCTAs > c.maxCTAs) {
        *error = "config: minCTAs is larger than maxCTAs";
        return false;
    }
    settings->has_net_name = c.netName, settings->has_comm_name = c.commName;
    if (c.netName) settings->net_name = c.netName;
    if (c.commName) settings->comm_name = c.commName;
    c.netName = c.commName = nullptr;  // the caller's memory
    return true;
}

}  // namespace mock_nccl

using namespace mock_nccl;

// A number of the last config; INT_MIN where it was not set, LLONG_MIN for a name that is none.
EXPORT long long mock_last_config(CommHandle handle, const char* name) {
    Call call("mock_last_config");
    if (!call.find(handle)) return LLONG_MIN;
    Config& c = call.comm->settings.fields;
    if (!strcmp(name, "size")) return static_cast<long long>(c.size);
    if (!strcmp(name, "magic")) return c.magic;
    if (!strcmp(name, "version")) return c.version;
    for (const Field& field : kFields)
        if (!field.text && !strcmp(name, field.name)) return int_of(c, field);
    return LLONG_MIN;
}

// netName or commName; NULL where it was not set.
EXPORT const char* mock_last_config_text(CommHandle handle, const char* name) {
    Call call("mock_last_config_text");
    if (!call.find(handle)) return nullptr;
    const Settings& s = call.comm->settings;
    if (!strcmp(name, "netName") && s.has_net_name) return s.net_name.c_str();
    if (!strcmp(name, "commName") && s.has_comm_name) return s.comm_name.c_str();
    return nullptr;
}
