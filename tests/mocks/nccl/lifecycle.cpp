// Communicators are made, from unique ids or from others, and ended.
#include <dirent.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>

#include "group.hpp"

namespace mock_nccl {
namespace {

constexpr char kPrefix[] = "nccl-mock-";
constexpr char kIdMark[] = "NCCL mock";

std::string hex(uint64_t value) {
    char text[17];
    snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(value));
    return text;
}

// A segment whose ranks were killed before all had joined keeps its name; the process is in it.
void remove_abandoned_segments() {
    DIR* folder = opendir("/dev/shm");
    if (!folder) return;
    while (dirent* entry = readdir(folder)) {
        if (strncmp(entry->d_name, kPrefix, sizeof kPrefix - 1) != 0) continue;
        std::string name = std::string("/dev/shm/") + entry->d_name;
        struct stat status;
        int pid = atoi(entry->d_name + sizeof kPrefix - 1);
        bool old = stat(name.c_str(), &status) == 0 && time(nullptr) - status.st_mtime > 60;
        if (old && kill(pid, 0) != 0 && errno == ESRCH) ::unlink(name.c_str());
    }
    closedir(folder);
}

std::string new_id() {
    std::random_device random;
    return std::to_string(getpid()) + "-" + hex(static_cast<uint64_t>(random()) << 32 | random());
}

// What all ranks make of the same communicator without a message: FNV-1a of both texts.
std::string derived_id(const std::string& parent, const std::string& what) {
    uint64_t hash = 14695981039346656037u;
    for (char c : parent + what) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211u;
    return parent.substr(0, parent.find('-')) + "-" + hex(hash);
}

void write_unique_id(UniqueId* id, const std::string& name) {
    memset(id, 0, sizeof *id);
    memcpy(id->internal, kIdMark, sizeof kIdMark);
    memcpy(id->internal + sizeof kIdMark, name.c_str(), name.size() + 1);
}

bool read_unique_id(const UniqueId& id, std::string* name) {
    if (memcmp(id.internal, kIdMark, sizeof kIdMark) != 0) return false;
    *name = std::string(id.internal + sizeof kIdMark, strnlen(id.internal + sizeof kIdMark, 64));
    return true;
}

// NCCL_MOCK_INIT_ERROR=CODE or CODE@RANK.
Result planned_error(int rank) {
    const char* plan = environment("NCCL_MOCK_INIT_ERROR");
    if (!plan) return kSuccess;
    const char* at = strchr(plan, '@');
    return !at || atoi(at + 1) == rank ? static_cast<Result>(atoi(plan)) : kSuccess;
}

// Meets the other ranks in the segment; returns when all are there. Who aborts the parent ends this, too;
// with `split` the peers of the parent are all needed, so that an error of the parent does as well.
Result join(const CommPtr& comm, const CommPtr& parent = nullptr, bool split = false) {
    std::string error;
    if (Result planned = planned_error(comm->rank)) {
        set_last_error(comm, "a planned error at initialisation (NCCL mock)");
        return planned;
    }
    auto segment = Segment::open("/" + std::string(kPrefix) + comm->id, &error);
    if (!segment || !segment->attach(comm->nranks, comm->rank, &error)) {
        set_last_error(comm, error + " (NCCL mock)");
        return segment ? kInvalidUsage : kSystemError;
    }
    {
        std::lock_guard lock(comm->mutex);
        comm->segment = segment;
        ++comm->inside;
    }
    auto ended = [&] {
        if (split) parent->look_at_peers();
        comm->look_at_peers();
        return comm->aborted || comm->state == kRemoteError || (parent && parent->aborted) ||
               (split && parent->state == kRemoteError);
    };
    for (;;) {
        uint32_t seen = segment->bell(comm->rank);
        if (segment->complete(comm->nranks) || ended()) break;
        segment->wait(comm->rank, seen, 50);
    }
    bool joined = segment->complete(comm->nranks);
    if (!joined) segment->unlink();
    std::lock_guard lock(comm->mutex);
    --comm->inside;
    comm->changed.notify_all();
    if (joined) return kSuccess;
    return comm->aborted || (parent && parent->aborted) ? kInternalError : kRemoteError;
}

CommPtr new_comm(const std::string& id, int nranks, int rank, const Settings& settings) {
    auto comm = std::make_shared<Comm>();
    comm->id = id, comm->nranks = nranks, comm->rank = rank, comm->settings = settings;
    comm->device = current_device();
    return comm;
}

// `late`: a communicator that does not block is filled in when it is ready.
Result initialise(Call& call, CommHandle* place, int nranks, const UniqueId& id, int rank,
                  const Config* config, bool late = false) {
    std::string name, error;
    Settings settings;
    call.extra += ",\"nranks\":" + std::to_string(nranks) + ",\"rank\":" + std::to_string(rank);
    if (!place) return failed(call.fail(kInvalidArgument, "the place for the communicator is NULL"));
    if (nranks < 1 || rank < 0 || rank >= nranks)
        return failed(
            call.fail(kInvalidArgument, "rank " + std::to_string(rank) + " of " + std::to_string(nranks)));
    if (nranks > kMaxRanks)
        return failed(call.fail(kInvalidUsage, "at most " + std::to_string(kMaxRanks) + " ranks"));
    if (!read_unique_id(id, &name))
        return failed(
            call.fail(kInvalidArgument, "the unique id was not made by ncclGetUniqueId of this library"));
    if (!read_settings(config, default_settings(), &settings, &error))
        return failed(call.fail(kInvalidArgument, error));
    CommPtr comm = new_comm(name, nranks, rank, settings);
    CommHandle handle = new_handle(comm);
    late = late && !settings.blocking();
    *place = late ? nullptr : handle;
    comm->state = kInProgress;
    auto work = [comm, place, handle] {
        Result result = join(comm);
        int expected = kInProgress;
        // Only a caller that waits for it loses its handle; the others abort theirs.
        bool lost = result != kSuccess && comm->settings.blocking();
        if (lost) drop_handle(handle);
        if (!comm->aborted) *place = lost ? nullptr : handle;  // once more, as the real library does
        comm->state.compare_exchange_strong(expected, result);
        return result;
    };
    return perform(call, comm, settings.blocking(), work, !late);
}

// Makes a communicator of those ranks of `parent` whose `plan` says so; the handle is filled in when it is
// ready.
struct Plan {
    bool member;
    std::string id;
    int nranks, rank;
};
Result derive(Call& call, CommHandle* handle, const Config* config, bool split,
              std::function<bool(Plan*)> plan) {
    std::string error;
    Settings settings;
    CommPtr parent = call.comm;
    if (!handle) return failed(call.fail(kInvalidArgument, "the place for the new communicator is NULL"));
    if (!read_settings(config, parent->settings, &settings, &error))
        return failed(call.fail(kInvalidArgument, error));
    *handle = nullptr;
    auto work = [parent, handle, config, settings, split, plan = std::move(plan)]() mutable {
        Plan p;
        if (!plan(&p)) return parent->aborted ? kInternalError : kRemoteError;
        if (!p.member) return kSuccess;
        std::string error;  // texts are read as late as here
        if (!read_settings(config, parent->settings, &settings, &error)) return kInternalError;
        CommPtr comm = new_comm(p.id, p.nranks, p.rank, settings);
        comm->device = parent->device;
        Result result = join(comm);
        if (result == kSuccess) *handle = new_handle(comm);
        return result;
    };
    return perform(call, parent, parent->settings.blocking(), work, false);
}

std::atomic<bool> revokes_held{false};

// The real library makes the communicator's device current, and then the caller's again. On a device that the
// caller has only by default, that creates a context.
bool on_its_device(Call& call) {
    if (current_device() == call.comm->device) return true;
    call.error =
        call.fail(kInvalidUsage, "called on device " + std::to_string(current_device()) +
                                     " for a communicator on device " + std::to_string(call.comm->device));
    return false;
}

}  // namespace
}  // namespace mock_nccl

using namespace mock_nccl;

EXPORT Result ncclGetUniqueId(UniqueId* id) {
    Call call("ncclGetUniqueId");
    if (!id) return call.fail(kInvalidArgument, "the place for the unique id is NULL");
    remove_abandoned_segments();
    write_unique_id(id, new_id());
    return call.done();
}

EXPORT Result ncclCommInitRank(CommHandle* comm, int nranks, UniqueId id, int rank) {
    Call call("ncclCommInitRank");
    return initialise(call, comm, nranks, id, rank, nullptr);
}

EXPORT Result ncclCommInitRankConfig(CommHandle* comm, int nranks, UniqueId id, int rank,
                                     const Config* config) {
    Call call("ncclCommInitRankConfig");
    return initialise(call, comm, nranks, id, rank, config);
}

EXPORT Result ncclCommInitRankScalable(CommHandle* comm, int nranks, int rank, int n, UniqueId* ids,
                                       const Config* config) {
    Call call("ncclCommInitRankScalable");
    call.extra += ",\"ids\":" + std::to_string(n);
    if (!ids || n < 1 || n > nranks)
        return failed(
            call.fail(kInvalidArgument, std::to_string(n) + " unique ids for " + std::to_string(nranks)));
    return initialise(call, comm, nranks, ids[0], rank, config);
}

EXPORT Result ncclCommSplit(CommHandle handle, int color, int key, CommHandle* child, const Config* config) {
    Call call("ncclCommSplit");
    call.extra += ",\"color\":" + std::to_string(color) + ",\"key\":" + std::to_string(key);
    if (!call.find(handle)) return failed(call.error);
    CommPtr parent = call.comm;
    if (!parent->revoked && !call.find_ready(handle)) return failed(call.error);
    if (parent->finalized) return failed(call.fail(kInvalidUsage, "the communicator is finalized"));
    if (!parent->revoked && !parent->quiet())  // the real one says so, and may wait for ever
        return failed(call.fail(kInvalidUsage, "there are outstanding operations"));
    if (color < 0 && color != kNoColor)
        return failed(call.fail(kInvalidArgument, "color " + std::to_string(color) + " is negative"));
    return derive(call, child, config, true, [parent, color, key](Plan* plan) {
        struct Wish {
            int color, key;
            char id[64];
        };
        Wish mine{color, key, {}};
        strncpy(mine.id, new_id().c_str(), sizeof mine.id - 1);
        std::vector<Wish> all(parent->nranks);
        if (!parent->exchange(&mine, sizeof mine, all.data())) return false;
        std::vector<int> members;
        for (int r = 0; r < parent->nranks; ++r)
            if (all[r].color == color) members.push_back(r);
        std::stable_sort(members.begin(), members.end(),
                         [&](int a, int b) { return all[a].key < all[b].key; });
        auto me = std::find(members.begin(), members.end(), parent->rank) - members.begin();
        *plan = {color != kNoColor, all[members[0]].id, static_cast<int>(members.size()),
                 static_cast<int>(me)};
        return true;
    });
}

EXPORT Result ncclCommShrink(CommHandle handle, int* excluded, int n, CommHandle* child, const Config* config,
                             int flags) {
    Call call("ncclCommShrink");
    call.extra += ",\"excluded\":" + std::to_string(n) + ",\"flags\":" + std::to_string(flags);
    if (!call.find(handle)) return failed(call.error);
    CommPtr parent = call.comm;
    if (flags != 0 && flags != kShrinkAbort)
        return failed(call.fail(kInvalidArgument, "unknown shrink flags"));
    // A communicator in error can only be shrunk by ending what runs on it.
    if (flags == 0 && !parent->revoked && !call.find_ready(handle)) return failed(call.error);
    if (!excluded || n < 1 || n >= parent->nranks)
        return failed(call.fail(kInvalidArgument, "excludes " + std::to_string(n) + " ranks"));
    std::vector<bool> out(parent->nranks);
    for (int i = 0; i < n; ++i) {
        if (excluded[i] < 0 || excluded[i] >= parent->nranks || out[excluded[i]])
            return failed(call.fail(kInvalidArgument, "cannot exclude rank " + std::to_string(excluded[i])));
        out[excluded[i]] = true;
    }
    if (out[parent->rank])
        return failed(call.fail(kInvalidArgument, "an excluded rank does not call ncclCommShrink"));
    std::string what = "shrink" + std::to_string(parent->shrinks++);
    if (flags == kShrinkAbort) {
        parent->stop(parent->revoked);
        parent->state = kSuccess;
    }
    return derive(call, child, config, false, [parent, out, what](Plan* plan) mutable {
        *plan = {true, "", 0, 0};
        for (int r = 0; r < parent->nranks; ++r) {
            if (r == parent->rank) plan->rank = plan->nranks;
            if (!out[r]) ++plan->nranks;
            what += out[r] ? '-' : '+';
        }
        plan->id = derived_id(parent->id, what);
        return true;
    });
}

EXPORT Result ncclCommGetUniqueId(CommHandle handle, UniqueId* id) {
    Call call("ncclCommGetUniqueId");
    if (!call.find_ready(handle)) return call.error;
    if (!id) return call.fail(kInvalidArgument, "the place for the unique id is NULL");
    std::lock_guard lock(call.comm->mutex);
    if (call.comm->growing) return call.fail(kInvalidUsage, "the last unique id has not been used");
    call.comm->growing = true;
    write_unique_id(id, derived_id(call.comm->id, "grow" + std::to_string(call.comm->grows)));
    return call.done();
}

EXPORT Result ncclCommGrow(CommHandle handle, int nranks, const UniqueId* id, int rank, CommHandle* child,
                           const Config* config) {
    Call call("ncclCommGrow");
    if (!handle) {
        if (!id) return failed(call.fail(kInvalidArgument, "a new rank needs the unique id"));
        return initialise(call, child, nranks, *id, rank, config, true);
    }
    if (!call.find_ready(handle)) return failed(call.error);
    CommPtr parent = call.comm;
    if (rank != -1)
        return failed(call.fail(kInvalidArgument, "a rank that is there already keeps its rank: pass -1"));
    if (nranks <= parent->nranks || nranks > kMaxRanks)
        return failed(call.fail(kInvalidArgument, "cannot grow to " + std::to_string(nranks)));
    if (!parent->quiet()) return failed(call.fail(kInvalidUsage, "there are outstanding operations"));
    std::string name = derived_id(parent->id, "grow" + std::to_string(parent->grows)), given;
    if (id && (!read_unique_id(*id, &given) || given != name || !parent->growing))
        return failed(call.fail(kInvalidArgument, "the unique id is not the last of ncclCommGetUniqueId"));
    ++parent->grows;
    parent->growing = false;
    return derive(call, child, config, false, [parent, name, nranks](Plan* plan) {
        *plan = {true, name, nranks, parent->rank};
        return true;
    });
}

EXPORT Result ncclCommFinalize(CommHandle handle) {
    Call call("ncclCommFinalize");
    if (!call.find_ready(handle) || !on_its_device(call)) return failed(call.error);
    CommPtr comm = call.comm;
    if (comm->revoked) return failed(call.fail(kInvalidUsage, "the communicator is revoked"));
    if (comm->finalized.exchange(true)) return failed(call.fail(kInvalidArgument, "it is finalized already"));
    return perform(call, comm, comm->settings.blocking(), [comm] {
        comm->wait_quiet();
        comm->wait_graphs();
        return kSuccess;
    });
}

EXPORT Result ncclCommDestroy(CommHandle handle) {
    Call call("ncclCommDestroy");
    if (!call.find(handle) || !on_its_device(call)) return call.error;
    drop_handle(handle);
    if (call.comm->settings.blocking()) {
        call.comm->wait_quiet();
        call.comm->wait_graphs();
    } else {
        start_thread([comm = call.comm] { comm->wait_quiet(); });
    }
    return call.done();
}

EXPORT Result ncclCommAbort(CommHandle handle) {
    Call call("ncclCommAbort");
    if (!call.find(handle) || !on_its_device(call)) return call.error;
    drop_handle(handle);
    CommPtr comm = call.comm;
    comm->stop(comm->aborted);
    {
        std::lock_guard lock(comm->mutex);
        if (comm->segment) comm->segment->set_presence(comm->rank, kAborted);
    }
    comm->wait_graphs();  // an abort ends what runs, and still waits for what may be launched
    return call.done();
}

EXPORT Result ncclCommRevoke(CommHandle handle, int flags) {
    Call call("ncclCommRevoke");
    if (!call.find(handle) || !on_its_device(call)) return call.error;
    CommPtr comm = call.comm;
    if (flags != 0) return call.fail(kInvalidArgument, "the flags must be 0");
    return perform(call, comm, comm->settings.blocking(), [comm] {
        while (revokes_held) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        comm->stop(comm->revoked);
        return kSuccess;
    });
}

// While it is on, revokes do not come to their work: the real one waits for the device.
EXPORT void mock_hold_revokes(int on) { revokes_held = on != 0; }
