// A rank's communicator, the handles of live ones, and how calls report: last error and log.
#pragma once
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "abi.hpp"
#include "reduce.hpp"
#include "segment.hpp"
#include "version.hpp"

namespace mock_nccl {

// What a communicator was given, as it arrived and after the fields that it must not see are reset.
struct Settings {
    Config fields;
    std::string net_name, comm_name;
    bool has_net_name = false, has_comm_name = false;
    bool blocking() const { return fields.blocking != 0; }
};
Settings default_settings();
// `given` may be null: `inherited`. False with a text for nonsense.
bool read_settings(const Config* given, const Settings& inherited, Settings* settings, std::string* error);

struct OwnReduction {
    Reduction reduction;
    int dtype;
    const void* device_scalar;  // read when the operation runs; null for one that was read at once
};

struct Window {
    int index;
    void* base;
    // Of each rank.
    std::vector<int> pids;
    std::vector<uint64_t> addresses, sizes;
};

struct Comm : std::enable_shared_from_this<Comm> {
    std::string id;
    int nranks = 0, rank = 0, device = 0;
    Settings settings;
    std::shared_ptr<Segment> segment;  // null until it joins; written under `mutex`

    std::atomic<int> state{kSuccess};                  // what GetAsyncError says
    std::atomic<int> busy_polls{0};                    // how often it says "in progress" first
    std::atomic<bool> aborted{false}, revoked{false};  // running operations end
    std::atomic<bool> finalized{false}, suspended{false};
    bool stopped() const { return aborted || revoked; }

    std::mutex mutex;
    std::condition_variable changed;
    uint64_t issued = 0, finished = 0;  // jobs; they run in this order whatever their streams are
    int inside = 0;                     // threads that use the segment now
    int graphs = 0;

    std::mutex control;  // one exchange with the other ranks at a time
    std::string last_error;
    std::map<int, OwnReduction> reductions;
    std::map<void*, size_t> registered;
    std::map<void*, Window> windows;
    std::set<int> met_peers;                     // with whom messages have connected, and
    std::set<std::string> met_collectives;       // which collectives have: see NCCL_MOCK_LAZY_CONNECT
    uint64_t awaited[kMaxRanks][kSignals] = {};  // signals of each rank that a wait has taken
    int next_reduction = 0, next_window = 0, shrinks = 0, grows = 0;
    bool growing = false;
    std::chrono::steady_clock::time_point looked_at_peers;

    ~Comm();
    void wait_quiet();  // until no job is left
    bool quiet();
    void wait_graphs();  // until no graph is left that has captured operations of several ranks
    // One more graph; one less when it is dropped.
    std::shared_ptr<void> hold_for_graph();
    void stop(std::atomic<bool>& flag);
    // With NCCL_MOCK_PEER_ERRORS=1: a dead or aborted peer makes the state a remote error.
    void look_at_peers();
    // Gathers `bytes` of every rank, in rank order. False when aborted.
    bool exchange(const void* mine, size_t bytes, void* all);
    // Waits until these ranks have called this, too. False when aborted or revoked.
    bool meet(const std::set<int>& peers);

  private:
    bool exchange_with(const std::set<int>& peers, const void* mine, size_t bytes, void* all,
                       bool while_revoked);
};
using CommPtr = std::shared_ptr<Comm>;

CommHandle new_handle(const CommPtr& comm);
CommHandle reserve_handle();
void drop_handle(CommHandle handle);
CommPtr live_comm(CommHandle handle);  // null for none

// One call of the API, for the log; absent values are not written.
struct Call {
    const char* function;
    CommPtr comm;
    long long count = -1;
    int dtype = -1, op = -1, root = -1, peer = -1;
    const void* send = nullptr;
    void* recv = nullptr;
    void* stream = nullptr;
    bool has_stream = false;
    std::string extra;  // more JSON members

    explicit Call(const char* name) : function(name) {}
    // The communicator of a handle; null, with the error set, for one that is not alive.
    bool find(CommHandle handle);
    // As find, and the communicator is ready for operations.
    bool find_ready(CommHandle handle);
    Result fail(Result code, const std::string& text);
    Result done(Result code = kSuccess);
    Result error = kSuccess;  // of a failed find
};
void write_log(const std::string& members);
void warn(const std::string& text);  // in NCCL's own log
void log_mismatch(const Comm& comm, const Signature& mine, int peer, const Signature& theirs);
void set_last_error(const CommPtr& comm, const std::string& text);
std::string last_error(const CommPtr& comm);

int group_depth();

}  // namespace mock_nccl
