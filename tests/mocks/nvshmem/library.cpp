// A mock of NVSHMEM: the same C functions over host memory that real processes share, for tests on machines
// without a GPU. No part of it is NVIDIA's. Streams are those of tests/mocks/nccl.
//
//     NVSHMEM_MOCK_LIMITED=1     as several PEs on one GPU without MPS
//     NVSHMEM_MOCK_NO_P2P=1      no PE can address another's memory; sources of puts must be symmetric
//     NVSHMEM_MOCK_NO_DEVICE=1   as where there is no GPU: init succeeds, and nothing but connects (3.4.5)
//     NVSHMEM_MOCK_REFUSES=N     init returns N
//     NVSHMEM_MOCK_HOST_STREAM=1 the default stream is the host's: what is put there is done when a call
//     returns NVSHMEM_MOCK_LOG=FILE      each call of the host's life as a line: PE, function, argument
//
// As the library does, it ends the process where a call is wrong or not allowed.
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "abi.hpp"
#include "streams.hpp"
#include "world.hpp"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using namespace mock_nvshmem;

#ifndef MOCK_VERSION
#define MOCK_VERSION 30800
#endif
constexpr int kVersion = MOCK_VERSION;

bool asked_for(const char* name) {
    const char* value = getenv(name);
    return value != nullptr && *value != 0 && std::string(value) != "0";
}

struct State {
    std::mutex mutex;
    int status = STATUS_NOT_INITIALIZED;
    World* world = nullptr;
    std::vector<std::function<void()>> delayed;  // what is non-blocking happens at quiet, and not before
    bool no_p2p = false;
};
State& state() {
    static State* s = new State;
    return *s;
}

[[noreturn]] void die(const std::string& what) {
    fprintf(stderr, "NVSHMEM mock: %s, exiting...\n", what.c_str());
    fflush(stderr);
    _exit(255);
}

void log(const char* function, long argument) {
    const char* path = getenv("NVSHMEM_MOCK_LOG");
    if (path == nullptr) return;
    FILE* file = fopen(path, "a");
    if (file == nullptr) return;
    fprintf(file, "%d %s %ld\n", state().world ? state().world->me() : -1, function, argument);
    fclose(file);
}

World& world() {
    if (state().status < STATUS_IS_INITIALIZED) die("a call before the library is initialised");
    return *state().world;
}
World& not_limited(const char* function) {
    World& w = world();
    if (state().status == STATUS_LIMITED_MPG)
        die(std::string(function) + " is not supported with limited MPG");
    return w;
}

void check_symmetric(World& w, const void* address, size_t bytes, const char* function) {
    if (!w.holds(address, bytes)) die(std::string(function) + ": the address is not in the symmetric heap");
}
void check_pe(World& w, int pe, const char* function) {
    if (pe < 0 || pe >= w.npes()) die(std::string(function) + ": no PE " + std::to_string(pe));
}
void check_local(World& w, const void* address, size_t bytes, int pe, const char* function) {
    if (state().no_p2p && pe != w.me() && !w.holds(address, bytes)) {
        die(std::string(function) + ": the local buffer is neither symmetric nor registered");
    }
}

void on_stream(cudaStream_t handle, std::function<void()> task) {
    auto stream = mock_nccl::find_stream(handle);
    if (!stream) die("no such stream");
    stream->enqueue(std::move(task));
    static const bool of_the_host = asked_for("NVSHMEM_MOCK_HOST_STREAM");
    if (of_the_host && handle == nullptr) stream->synchronize();
}

void do_delayed() {
    std::vector<std::function<void()>> now;
    {
        std::lock_guard lock(state().mutex);
        now.swap(state().delayed);
    }
    for (auto& task : now) task();
}

void set_signal(uint64_t* word, uint64_t value, int op) {
    if (op == NVSHMEM_SIGNAL_SET) {
        __atomic_store_n(word, value, __ATOMIC_RELEASE);
    } else {
        __atomic_fetch_add(word, value, __ATOMIC_ACQ_REL);
    }
}

bool compares(uint64_t found, int cmp, uint64_t value) {
    switch (cmp) {
        case NVSHMEM_CMP_EQ:
            return found == value;
        case NVSHMEM_CMP_NE:
            return found != value;
        case NVSHMEM_CMP_GT:
            return found > value;
        case NVSHMEM_CMP_LE:
            return found <= value;
        case NVSHMEM_CMP_LT:
            return found < value;
        default:
            return found >= value;
    }
}

uint64_t heap_bytes() {
    const char* text = getenv("NVSHMEM_SYMMETRIC_SIZE");
    return text == nullptr ? uint64_t{1} << 30 : strtoull(text, nullptr, 10);
}

bool known_version(int said, size_t bytes) {
    int newest = kVersion >= 30800 ? 2 : 1;
    for (int version = 1; version <= newest; ++version) {
        if (said == (version << 16) + int(bytes)) return true;
    }
    return false;
}

void copy(const char* function, bool put, bool blocking, void* to, const void* from, size_t bytes, int pe,
          cudaStream_t stream) {
    World& w = world();
    check_pe(w, pe, function);
    check_symmetric(w, put ? to : from, bytes, function);
    check_local(w, put ? from : to, bytes, pe, function);
    void* target = put ? w.there(static_cast<char*>(to), pe) : to;
    const void* source = put ? from : w.there(static_cast<const char*>(from), pe);
    auto move = [=] { memcpy(target, source, bytes); };
    if (blocking) {
        on_stream(stream, move);
    } else {
        on_stream(stream, [=] {
            std::lock_guard lock(state().mutex);
            state().delayed.push_back(move);
        });
    }
}

}  // namespace

// --- life --------------------------------------------------------------------------------------------------

EXPORT void nvshmemx_vendor_get_version_info(int* major, int* minor, int* patch) {
    *major = kVersion / 10000, *minor = kVersion / 100 % 100, *patch = kVersion % 100;
}

EXPORT int nvshmemx_init_status() { return state().status; }

EXPORT int nvshmemx_get_uniqueid(nvshmemx_uniqueid_v1* id) {
    std::random_device random;
    *id = {};
    id->version = (1 << 16) + int(sizeof *id);
    for (int i = 0; i < 16; i += 4) {
        uint32_t word = random();
        memcpy(id->internal + i, &word, 4);
    }
    return 0;
}

EXPORT int nvshmemx_set_attr_uniqueid_args(const int rank, const int n, const nvshmemx_uniqueid_v1* id,
                                           nvshmemx_init_attr_v2* attr) {
    if (!known_version(attr->version, sizeof *attr) ||
        !known_version(attr->args.version, sizeof attr->args)) {
        return 1;
    }
    attr->args.uid_args = {(1 << 16) + int(sizeof(nvshmemx_uniqueid_args_v1)),
                           const_cast<nvshmemx_uniqueid_v1*>(id), rank, n};
    return 0;
}

EXPORT int nvshmemx_hostlib_init_attr(unsigned flags, nvshmemx_init_attr_v2* attr) {
    const auto& args = attr->args.uid_args;
    bool good = flags == NVSHMEMX_INIT_WITH_UNIQUEID && known_version(attr->version, sizeof *attr) &&
                known_version(attr->args.version, sizeof attr->args) && args.id != nullptr &&
                args.id->version == (1 << 16) + int(sizeof *args.id) && args.nranks > 0 &&
                args.nranks <= kMaxPes && args.myrank >= 0 && args.myrank < args.nranks;
    if (!good || state().status >= STATUS_IS_INITIALIZED) return 1;
    if (const char* refuses = getenv("NVSHMEM_MOCK_REFUSES")) return atoi(refuses);
    if (asked_for("NVSHMEM_MOCK_NO_DEVICE")) {
        state().status = STATUS_IS_BOOTSTRAPPED;
        return 0;
    }
    std::string name = "/unicomm-nvshmem-mock-";
    for (int i = 0; i < 16; ++i) {
        char digits[3];
        snprintf(digits, sizeof digits, "%02x", (unsigned char)args.id->internal[i]);
        name += digits;
    }
    try {
        state().world = new World(name, args.myrank, args.nranks, heap_bytes());
    } catch (const std::exception& failure) {
        fprintf(stderr, "NVSHMEM mock: %s\n", failure.what());
        return 7;
    }
    state().no_p2p = asked_for("NVSHMEM_MOCK_NO_P2P");
    state().status = asked_for("NVSHMEM_MOCK_LIMITED") ? STATUS_LIMITED_MPG : STATUS_IS_INITIALIZED;
    log("init", args.nranks);
    return 0;
}

EXPORT void nvshmemx_hostlib_finalize() {
    World& w = world();
    log("finalize", 0);
    w.meet(NVSHMEM_TEAM_WORLD);
    state().status = STATUS_NOT_INITIALIZED;
    delete state().world;
    state().world = nullptr;
}

EXPORT int nvshmem_my_pe() { return state().status < STATUS_IS_INITIALIZED ? -1 : state().world->me(); }
EXPORT int nvshmem_n_pes() { return state().status < STATUS_IS_INITIALIZED ? -1 : state().world->npes(); }

// --- memory ------------------------------------------------------------------------------------------------

EXPORT void* nvshmem_align(size_t align, size_t bytes) {
    World& w = world();
    if (align == 0 || (align & (align - 1)) != 0) die("nvshmem_align: the alignment is no power of two");
    log("align", long(bytes));
    void* found = bytes == 0 ? nullptr : w.take(align, bytes);
    w.meet(NVSHMEM_TEAM_WORLD);
    return found;
}

EXPORT void nvshmem_free(void* address) {
    World& w = world();
    log("free", 0);
    w.meet(NVSHMEM_TEAM_WORLD);
    if (address != nullptr && !w.give(address)) die("nvshmem_free: nothing was allocated there");
}

EXPORT void* nvshmem_ptr(const void* address, int pe) {
    World& w = world();
    if (pe < 0 || pe >= w.npes() || !w.holds(address, 0) || (state().no_p2p && pe != w.me())) return nullptr;
    return w.there(static_cast<char*>(const_cast<void*>(address)), pe);
}

EXPORT void nvshmem_barrier_all() {
    World& w = world();
    do_delayed();
    w.meet(NVSHMEM_TEAM_WORLD);
}

EXPORT void nvshmem_uint64_p(uint64_t* to, const uint64_t value, int pe) {
    World& w = world();
    check_pe(w, pe, "p"), check_symmetric(w, to, 8, "p");
    __atomic_store_n(w.there(to, pe), value, __ATOMIC_RELEASE);
}

EXPORT uint64_t nvshmem_uint64_g(const uint64_t* from, int pe) {
    World& w = world();
    check_pe(w, pe, "g"), check_symmetric(w, from, 8, "g");
    return __atomic_load_n(w.there(from, pe), __ATOMIC_ACQUIRE);
}

// --- on streams --------------------------------------------------------------------------------------------

EXPORT void nvshmemx_putmem_on_stream(void* to, const void* from, size_t bytes, int pe, cudaStream_t stream) {
    copy("putmem", true, true, to, from, bytes, pe, stream);
}
EXPORT void nvshmemx_getmem_on_stream(void* to, const void* from, size_t bytes, int pe, cudaStream_t stream) {
    copy("getmem", false, true, to, from, bytes, pe, stream);
}
EXPORT void nvshmemx_putmem_nbi_on_stream(void* to, const void* from, size_t bytes, int pe,
                                          cudaStream_t stream) {
    copy("putmem_nbi", true, false, to, from, bytes, pe, stream);
}
EXPORT void nvshmemx_getmem_nbi_on_stream(void* to, const void* from, size_t bytes, int pe,
                                          cudaStream_t stream) {
    copy("getmem_nbi", false, false, to, from, bytes, pe, stream);
}

EXPORT void nvshmemx_signal_op_on_stream(uint64_t* signal, uint64_t value, int op, int pe,
                                         cudaStream_t stream) {
    World& w = world();
    check_pe(w, pe, "signal_op"), check_symmetric(w, signal, 8, "signal_op");
    if (op != NVSHMEM_SIGNAL_SET && op != NVSHMEM_SIGNAL_ADD) die("signal_op: no such operation");
    uint64_t* word = w.there(signal, pe);
    on_stream(stream, [=] { set_signal(word, value, op); });
}

EXPORT void nvshmemx_putmem_signal_on_stream(void* to, const void* from, size_t bytes, uint64_t* signal,
                                             uint64_t value, int op, int pe, cudaStream_t stream) {
    nvshmemx_putmem_on_stream(to, from, bytes, pe, stream);
    nvshmemx_signal_op_on_stream(signal, value, op, pe, stream);
}

EXPORT void nvshmemx_signal_wait_until_on_stream(uint64_t* signal, int cmp, uint64_t value,
                                                 cudaStream_t stream) {
    World& w = not_limited("signal_wait_until_on_stream");
    check_symmetric(w, signal, 8, "signal_wait_until");
    if (cmp < NVSHMEM_CMP_EQ || cmp > NVSHMEM_CMP_GE) die("signal_wait_until: no such comparison");
    on_stream(stream, [=] {
        for (int looks = 0; !compares(__atomic_load_n(signal, __ATOMIC_ACQUIRE), cmp, value); ++looks) {
            if (looks < 200) {
                std::this_thread::yield();
            } else {
                std::this_thread::sleep_for(std::chrono::microseconds(20));
            }
        }
    });
}

EXPORT void nvshmemx_quiet_on_stream(cudaStream_t stream) {
    world();
    on_stream(stream, do_delayed);
}

EXPORT void nvshmemx_barrier_all_on_stream(cudaStream_t stream) {
    World& w = world();
    auto meet = [&w] {
        do_delayed();
        w.meet(NVSHMEM_TEAM_WORLD);
    };
    on_stream(stream, meet);
    if (state().status == STATUS_LIMITED_MPG) mock_nccl::find_stream(stream)->synchronize();  // by the host
}

EXPORT int nvshmemx_barrier_on_stream(nvshmem_team_t team, cudaStream_t stream) {
    World& w = not_limited("barrier_on_stream");
    if (w.team(team) == nullptr) return 1;
    on_stream(stream, [&w, team] {
        do_delayed();
        w.meet(team);
    });
    return 0;
}

// --- teams -------------------------------------------------------------------------------------------------

EXPORT int nvshmem_team_split_strided(nvshmem_team_t parent, int start, int stride, int size,
                                      const void* config, long mask, nvshmem_team_t* made) {
    World& w = not_limited("team_split_strided");
    *made = NVSHMEM_TEAM_INVALID;
    const Team* team = w.team(parent);
    bool good = team != nullptr && start >= 0 && stride >= 1 && size >= 1 && config == nullptr && mask == 0;
    if (!good || start + (size - 1) * stride >= team->size) return 1;
    log("team_split", size);
    int number = w.split(*team, parent, start, stride, size);
    if (number == -2) return 1;
    *made = number < 0 ? NVSHMEM_TEAM_INVALID : number;
    return 0;
}

EXPORT void nvshmem_team_destroy(nvshmem_team_t team) {
    if (team == NVSHMEM_TEAM_INVALID) return;
    World& w = world();
    log("team_destroy", team);
    w.destroy(team);
}
