// The functions of the ABI for operations; those of 2.32 with a configuration beside the plain ones.
#include "operations.hpp"

using namespace mock_nccl;

#define PLACE CommHandle comm, StreamHandle stream

EXPORT Result ncclAllReduce(const void* send, void* recv, size_t count, int dtype, int op, PLACE) {
    return all_reduce(begin("ncclAllReduce", send, recv, count, dtype, stream), op, comm);
}

EXPORT Result ncclReduce(const void* send, void* recv, size_t count, int dtype, int op, int root, PLACE) {
    return reduce_to(begin("ncclReduce", send, recv, count, dtype, stream), op, root, comm);
}

EXPORT Result ncclBcast(void* data, size_t count, int dtype, int root, PLACE) {
    return broadcast(begin("ncclBcast", data, data, count, dtype, stream), data, data, root, comm);
}

EXPORT Result ncclBroadcast(const void* send, void* recv, size_t count, int dtype, int root, PLACE) {
    return broadcast(begin("ncclBroadcast", send, recv, count, dtype, stream), send, recv, root, comm);
}

EXPORT Result ncclReduceScatter(const void* send, void* recv, size_t count, int dtype, int op, PLACE) {
    return reduce_scatter(begin("ncclReduceScatter", send, recv, count, dtype, stream), op, comm);
}

EXPORT Result ncclAllGather(const void* send, void* recv, size_t count, int dtype, PLACE) {
    return all_gather(begin("ncclAllGather", send, recv, count, dtype, stream), send, recv, comm);
}

EXPORT Result ncclSend(const void* data, size_t count, int dtype, int peer, PLACE) {
    return point_to_point(begin("ncclSend", data, nullptr, count, dtype, stream), true,
                          const_cast<void*>(data), peer, comm);
}

EXPORT Result ncclRecv(void* data, size_t count, int dtype, int peer, PLACE) {
    return point_to_point(begin("ncclRecv", nullptr, data, count, dtype, stream), false, data, peer, comm);
}

EXPORT Result ncclAlltoAll(const void* send, void* recv, size_t count, int dtype, PLACE) {
    return all_to_all(begin("ncclAlltoAll", send, recv, count, dtype, stream), send, recv, comm);
}

// RCCL has had these two for long.
EXPORT Result ncclGather(const void* send, void* recv, size_t count, int dtype, int root, PLACE) {
    return gather(begin("ncclGather", send, recv, count, dtype, stream), send, recv, root, comm);
}

EXPORT Result ncclScatter(const void* send, void* recv, size_t count, int dtype, int root, PLACE) {
    return scatter(begin("ncclScatter", send, recv, count, dtype, stream), send, recv, root, comm);
}

// RCCL's own.
#define COUNTS(name) const size_t name##counts[], const size_t name##displs[]

EXPORT Result ncclAllToAll(const void* send, void* recv, size_t count, int dtype, PLACE) {
    return all_to_all(begin("ncclAllToAll", send, recv, count, dtype, stream), send, recv, comm);
}

EXPORT Result ncclAllToAllv(const void* send, COUNTS(send), void* recv, COUNTS(recv), int dtype, PLACE) {
    return all_to_all_v(begin("ncclAllToAllv", send, recv, 1, dtype, stream), send, sendcounts, senddispls,
                        recv, recvcounts, recvdispls, comm);
}

EXPORT Result ncclAlltoAllv(const void* send, COUNTS(send), void* recv, COUNTS(recv), int dtype, PLACE) {
    return all_to_all_v(begin("ncclAlltoAllv", send, recv, 1, dtype, stream), send, sendcounts, senddispls,
                        recv, recvcounts, recvdispls, comm);
}

// What is in the configuration changes nothing here; that it is one is looked at, and told to the log.
static Call configured(Call call, const CollConfig* config, bool* good) {
    *good = !config || (config->size >= sizeof(CollConfig) && config->magic == kMagic);
    if (config && *good) call.extra += ",\"config_version\":" + std::to_string(config->version);
    if (!*good) call.error = call.fail(kInvalidArgument, "the collective's config was not initialised");
    return call;
}

#define CONFIG const CollConfig* config
#define CONFIGURED(name)                                                                   \
    bool good;                                                                             \
    Call call = configured(begin(#name, send, recv, count, dtype, stream), config, &good); \
    if (!good) return call.error

EXPORT Result ncclAllReduceConfig(const void* send, void* recv, size_t count, int dtype, int op, PLACE,
                                  CONFIG) {
    CONFIGURED(ncclAllReduceConfig);
    return all_reduce(call, op, comm);
}

EXPORT Result ncclBroadcastConfig(const void* send, void* recv, size_t count, int dtype, int root, PLACE,
                                  CONFIG) {
    CONFIGURED(ncclBroadcastConfig);
    return broadcast(call, send, recv, root, comm);
}

EXPORT Result ncclReduceConfig(const void* send, void* recv, size_t count, int dtype, int op, int root, PLACE,
                               CONFIG) {
    CONFIGURED(ncclReduceConfig);
    return reduce_to(call, op, root, comm);
}

EXPORT Result ncclAllGatherConfig(const void* send, void* recv, size_t count, int dtype, PLACE, CONFIG) {
    CONFIGURED(ncclAllGatherConfig);
    return all_gather(call, send, recv, comm);
}

EXPORT Result ncclReduceScatterConfig(const void* send, void* recv, size_t count, int dtype, int op, PLACE,
                                      CONFIG) {
    CONFIGURED(ncclReduceScatterConfig);
    return reduce_scatter(call, op, comm);
}

EXPORT Result ncclAlltoAllConfig(const void* send, void* recv, size_t count, int dtype, PLACE, CONFIG) {
    CONFIGURED(ncclAlltoAllConfig);
    return all_to_all(call, send, recv, comm);
}

EXPORT Result ncclGatherConfig(const void* send, void* recv, size_t count, int dtype, int root, PLACE,
                               CONFIG) {
    CONFIGURED(ncclGatherConfig);
    return gather(call, send, recv, root, comm);
}

EXPORT Result ncclScatterConfig(const void* send, void* recv, size_t count, int dtype, int root, PLACE,
                                CONFIG) {
    CONFIGURED(ncclScatterConfig);
    return scatter(call, send, recv, root, comm);
}
