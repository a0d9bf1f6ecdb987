// A test mock of NCCL and RCCL: their C ABI over host memory, between the processes and threads of one
// host.
//
// What it is: a library that a program opens as it would open libnccl.so.2, in tests on machines without a
// GPU. It has the functions, values and structures of the ABI (abi.hpp), NCCL's order of operations, groups,
// split, shrink, grow, windows, asynchronous errors and abort, and streams and events (streams.hpp) in place
// of the CUDA runtime: a "device pointer" is host memory. Older versions, and RCCL, are played:
// build.py leaves out the names that they have not; NCCL_MOCK_VERSION is only what the library says,
// and how it reads a config.
//
// What it is not: fast, NCCL's code or its algorithms, a proof of anything about hardware. It knows no
// networks, no topology; the NULL stream is each thread's own; a communicator has at most 16
// ranks.
//
// Of NCCL's variables it knows NCCL_DEBUG (WARN or INFO) and NCCL_DEBUG_FILE: errors are warnings there.
//
// For tests: NCCL_MOCK_LOG=PATH gets a JSON line for each call, and for each message whose signature is not
// what its receiver expected; NCCL_MOCK_PEER_ERRORS=1 makes dead and aborted peers remote errors;
// NCCL_MOCK_LSA=N lets N neighbours address each other's windows, and nobody else;
// NCCL_MOCK_INIT_ERROR=CODE[@RANK] fails initialisation; NCCL_MOCK_SLOW_ENQUEUE=1 lets calls of
// non-blocking communicators say "in progress" first; NCCL_MOCK_LAZY_CONNECT=1 lets the first call of each
// collective, and the first message with a peer, wait on the host for the other ranks.
#include "abi.hpp"
#include "comm.hpp"
#include "group.hpp"

using namespace mock_nccl;

EXPORT int mock_nccl_is_a_mock() { return 1; }

EXPORT const char* mock_description() {
    thread_local std::string text;
    text = std::string("test mock of ") + (is_rccl() ? "RCCL" : "NCCL") +
           " over host memory, playing version " + std::to_string(version());
    return text.c_str();
}

// Makes an asynchronous error, as a broken network would.
EXPORT Result mock_inject_error(CommHandle handle, int result) {
    Call call("mock_inject_error");
    if (!call.find(handle)) return call.error;
    set_last_error(call.comm, "an injected error (NCCL mock)");
    call.comm->state = result;
    return call.done();
}

// What a real library would say in its log on the way to an error.
EXPORT void mock_warn(const char* text) { warn(text); }

EXPORT Result ncclGetVersion(int* result) {
    Call call("ncclGetVersion");
    if (!result) return call.fail(kInvalidArgument, "the place for the version is NULL");
    *result = version();
    return call.done();
}

EXPORT const char* ncclGetErrorString(int result) {
    static const char* const kTexts[] = {
        "no error (NCCL mock)",
        "unhandled cuda error (NCCL mock)",
        "unhandled system error (NCCL mock)",
        "internal error (NCCL mock)",
        "invalid argument (NCCL mock)",
        "invalid usage (NCCL mock)",
        "remote process exited or there was a network error (NCCL mock)",
        "operation in progress (NCCL mock)",
        "timeout (NCCL mock)",
    };
    return result >= 0 && result <= kTimeout ? kTexts[result] : "unknown result code (NCCL mock)";
}

// The communicator's last error, else the thread's, else the process's.
EXPORT const char* ncclGetLastError(CommHandle handle) {
    thread_local std::string text;
    CommPtr comm = handle ? live_comm(handle) : nullptr;
    text = last_error(comm);
    return text.c_str();
}

EXPORT Result ncclCommGetAsyncError(CommHandle handle, int* result) {
    Call call("ncclCommGetAsyncError");
    if (!call.find(handle)) return call.error;
    if (!result) return call.fail(kInvalidArgument, "the place for the error is NULL");
    call.comm->look_at_peers();
    *result = call.comm->state;
    if (*result == kSuccess && call.comm->busy_polls > 0 && --call.comm->busy_polls > 0)
        *result = kInProgress;
    return kSuccess;  // asked all the time: not for the log
}

EXPORT Result ncclCommCount(CommHandle handle, int* count) {
    Call call("ncclCommCount");
    if (!call.find_ready(handle)) return call.error;
    if (!count) return call.fail(kInvalidArgument, "the place for the count is NULL");
    *count = call.comm->nranks;
    return call.done();
}

EXPORT Result ncclCommCuDevice(CommHandle handle, int* device) {
    Call call("ncclCommCuDevice");
    if (!call.find_ready(handle)) return call.error;
    if (!device) return call.fail(kInvalidArgument, "the place for the device is NULL");
    *device = call.comm->device;
    return call.done();
}

EXPORT Result ncclCommUserRank(CommHandle handle, int* rank) {
    Call call("ncclCommUserRank");
    if (!call.find_ready(handle)) return call.error;
    if (!rank) return call.fail(kInvalidArgument, "the place for the rank is NULL");
    *rank = call.comm->rank;
    return call.done();
}

EXPORT Result ncclCommSuspend(CommHandle handle, int flags) {
    Call call("ncclCommSuspend");
    if (!call.find_ready(handle)) return failed(call.error);
    if (flags != kSuspendMemory) return failed(call.fail(kInvalidArgument, "unknown suspend flags"));
    return perform(call, call.comm, call.comm->settings.blocking(), [comm = call.comm] {
        comm->wait_quiet();
        comm->suspended = true;
        return kSuccess;
    });
}

EXPORT Result ncclCommResume(CommHandle handle) {
    Call call("ncclCommResume");
    if (!call.find(handle)) return failed(call.error);
    if (!call.comm->suspended) return failed(call.fail(kInvalidUsage, "the communicator is not suspended"));
    call.comm->suspended = false;
    return call.done();
}

// Memory is that of the segment, all of which could be suspended.
EXPORT Result ncclCommMemStats(CommHandle handle, int stat, uint64_t* value) {
    Call call("ncclCommMemStats");
    if (!call.find(handle)) return call.error;
    if (!value || stat < 0 || stat > 3) return call.fail(kInvalidArgument, "no such statistic");
    uint64_t bytes = static_cast<uint64_t>(call.comm->nranks) * 128 * 1024;
    const uint64_t values[] = {bytes, call.comm->suspended ? 1u : 0u, 4096, bytes + 4096};
    *value = values[stat];
    return call.done();
}
