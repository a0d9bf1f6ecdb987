// The C interface of libucp (UCX), declared here: building needs no UCX headers. Each function is declared
// once in the lists below, with the version of UCX that introduced it (X-macro: name, since, type). A
// function that the opened library lacks is a null pointer. Source of names, versions and layouts: the public
// headers of UCX 1.22, whose structs grow at their end only and say by a mask which fields are set; versions
// by the headers of 1.10 to 1.22.
#pragma once
#include <sys/socket.h>

#include <cstdarg>
#include <cstddef>
#include <cstdint>

namespace unicomm::ucx {

using Config = void*;
using Context = void*;
using NativeWorker = void*;
using Endpoint = void*;
using Address = void;         // an opaque blob
using StatusPointer = void*;  // null, a request, or a status below zero as an address
using Tag = uint64_t;

enum Status : int8_t {
    kOk = 0,
    kInProgress = 1,
    kTruncated = -9,
    kNoDevice = -14,
    kBusy = -15,
    kCanceled = -16,
    kLastError = -100
};

// Takes a message of UCX's log, as a format: file, line, function, level, settings, format, values. Levels
// from fatal, 0, to data. Returns whether the next handler gets it, too.
using LogHandler = int(const char*, unsigned, const char*, int, const void*, const char*, va_list);
constexpr int kWarning = 2;

constexpr uint64_t bit(int n) { return uint64_t{1} << n; }

constexpr uint64_t kFieldFeatures = bit(0), kFieldMtWorkersShared = bit(5), kFieldEstimatedEps = bit(6);
constexpr uint64_t kFeatureTag = bit(0), kFeatureWakeup = bit(4);

struct Params {
    uint64_t field_mask;
    uint64_t features;
    size_t request_size;
    void* request_init;
    void* request_cleanup;
    uint64_t tag_sender_mask;
    int mt_workers_shared;
    size_t estimated_num_eps;
    size_t estimated_num_ppn;
    const char* name;
    size_t node_local_id;
};

constexpr uint64_t kWorkerThreadMode = bit(0), kWorkerFlags = bit(5);
constexpr int kSerialized = 1;  // several threads, one at a time
constexpr uint64_t kIgnoreRequestLeak = bit(0);

struct WorkerParams {
    uint64_t field_mask;
    int thread_mode;
    unsigned long cpu_mask[1024 / (8 * sizeof(unsigned long))];
    unsigned events;
    void* user_data;
    int event_fd;
    uint64_t flags;
    const char* name;
    size_t am_alignment;
    uint64_t client_id;
};

constexpr uint64_t kEpRemoteAddress = bit(0), kEpErrorMode = bit(1), kEpErrorHandler = bit(2);
constexpr int kErrorModePeer = 1;

struct SocketAddress {
    const sockaddr* address;
    socklen_t length;
};

struct EndpointParams {
    uint64_t field_mask;
    const Address* address;
    int error_mode;
    struct {
        void (*callback)(void* argument, Endpoint, Status);
        void* argument;
    } error_handler;
    void* user_data;
    unsigned flags;
    SocketAddress socket_address;
    void* connection_request;
    const char* name;
    SocketAddress local_socket_address;
};

struct TransportEntry {
    const char* transport_name;
    const char* device_name;
};

constexpr uint64_t kEpTransports = bit(3);

struct EndpointAttributes {
    uint64_t field_mask;
    char name[32];
    sockaddr_storage local_address;
    sockaddr_storage remote_address;
    struct {
        TransportEntry* entries;
        unsigned count;
        size_t entry_size;
    } transports;
    void* user_data;
};

struct ReceiveInfo {
    Tag sender_tag;
    size_t length;
};

constexpr uint32_t kOpCallback = 1u << 1, kOpUserData = 1u << 2, kOpDatatype = 1u << 3, kOpFlags = 1u << 4,
                   kOpMemoryType = 1u << 6, kOpReceiveInfo = 1u << 7;
constexpr uint64_t kBytes = 1 << 3;  // the datatype of contiguous elements of one byte
constexpr int kHostMemory = 0;
constexpr uint32_t kCloseForce = 1;

using SendCallback = void(void* request, Status, void* user_data);
using ReceiveCallback = void(void* request, Status, const ReceiveInfo*, void* user_data);

struct RequestParams {
    uint32_t mask;
    uint32_t flags;
    void* request;
    union {
        SendCallback* send;
        ReceiveCallback* receive;
    } callback;
    uint64_t datatype;
    void* user_data;
    void* reply_buffer;
    int memory_type;
    ReceiveInfo* receive_info;
    void* memory_handle;
    uint64_t remote_datatype;
    const void* remote;
    size_t remote_count;
};

constexpr int version_code(int major, int minor) { return major * 100 + minor; }
// The API's version that is asked for: the oldest with all required functions.
constexpr int kOldest = version_code(1, 10);

// clang-format off
// Of libucp. All of 0 are required.
#define UNICOMM_UCP_FUNCTIONS(X)                                                                               \
    X(ucp_get_version, 0, void(unsigned*, unsigned*, unsigned*))                                               \
    X(ucp_config_read, 0, Status(const char*, const char*, Config*))                                           \
    X(ucp_config_modify, 0, Status(Config, const char*, const char*))                                          \
    X(ucp_config_release, 0, void(Config))                                                                     \
    X(ucp_init_version, 0, Status(unsigned, unsigned, const Params*, Config, Context*))                        \
    X(ucp_cleanup, 0, void(Context))                                                                           \
    X(ucp_worker_create, 0, Status(Context, const WorkerParams*, NativeWorker*))                               \
    X(ucp_worker_destroy, 0, void(NativeWorker))                                                               \
    X(ucp_worker_get_address, 0, Status(NativeWorker, Address**, size_t*))                                     \
    X(ucp_worker_release_address, 0, void(NativeWorker, Address*))                                             \
    X(ucp_worker_progress, 0, unsigned(NativeWorker))                                                          \
    X(ucp_worker_get_efd, 0, Status(NativeWorker, int*))                                                       \
    X(ucp_worker_arm, 0, Status(NativeWorker))                                                                 \
    X(ucp_worker_flush_nbx, version_code(1, 10), StatusPointer(NativeWorker, const RequestParams*))            \
    X(ucp_ep_create, 0, Status(NativeWorker, const EndpointParams*, Endpoint*))                                \
    X(ucp_ep_close_nbx, version_code(1, 10), StatusPointer(Endpoint, const RequestParams*))                    \
    X(ucp_ep_query, version_code(1, 12), Status(Endpoint, EndpointAttributes*))                                \
    X(ucp_tag_send_nbx, version_code(1, 10),                                                                   \
      StatusPointer(Endpoint, const void*, size_t, Tag, const RequestParams*))                                 \
    X(ucp_tag_recv_nbx, version_code(1, 10),                                                                   \
      StatusPointer(NativeWorker, void*, size_t, Tag, Tag, const RequestParams*))                              \
    X(ucp_request_cancel, 0, void(NativeWorker, void*))                                                        \
    X(ucp_request_check_status, 0, Status(void*))                                                              \
    X(ucp_request_free, 0, void(void*))

// Of libucs, which libucp brings.
#define UNICOMM_UCS_FUNCTIONS(X)                                                                               \
    X(ucs_status_string, 0, const char*(Status))                                                               \
    X(ucs_global_opts_set_value, 0, Status(const char*, const char*))                                          \
    X(ucs_log_push_handler, 0, void(LogHandler*))
// clang-format on

// A peer's transports are told by an endpoint since this version.
constexpr int kTellsTransports = version_code(1, 13);

}  // namespace unicomm::ucx
