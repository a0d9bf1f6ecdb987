#include "comm.hpp"

#include <fcntl.h>
#include <poll.h>
#include <strings.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <thread>
#include <unordered_map>

namespace mock_nccl {
namespace {

// Never destroyed: threads may still run while the process ends.
struct Handles {
    std::mutex mutex;
    std::unordered_map<void*, CommPtr> live;
    std::string last_error;
};
Handles& handles() {
    static Handles* h = new Handles;
    return *h;
}
thread_local std::string own_last_error;

bool process_ended(int pid) {
    int fd = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
    if (fd < 0) return true;
    pollfd p{fd, POLLIN, 0};
    bool ended = poll(&p, 1, 0) > 0;
    close(fd);
    return ended;
}

std::string quoted(const std::string& text) {
    std::string out = "\"";
    for (char c : text) {
        if (c == '"' || c == '\\') out += '\\';
        out += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
    }
    return out + '"';
}

void add(std::string& line, const char* name, long long value) {
    line += std::string(",\"") + name + "\":" + std::to_string(value);
}

std::string members(const Signature& s) {
    std::string out = "{\"function\":" + quoted(s.function);
    add(out, "dtype", s.dtype);
    add(out, "op", s.op);
    add(out, "root", s.root);
    add(out, "count", static_cast<long long>(s.count));
    return out + "}";
}

// NCCL's own log: what NCCL_DEBUG and NCCL_DEBUG_FILE say is read with the first line, and never again.
class DebugLog {
  public:
    DebugLog() {
        const char* level = environment("NCCL_DEBUG");
        on_ = level && (strcasecmp(level, "WARN") == 0 || strcasecmp(level, "INFO") == 0);
        const char* path = environment("NCCL_DEBUG_FILE");
        FILE* file = on_ && path ? fopen(path, "w") : nullptr;
        if (!file) return;
        setlinebuf(file);
        file_ = file;
    }
    void warn(const std::string& text) {
        if (!on_) return;
        char time_text[32], host[64] = "";
        time_t now = time(nullptr);
        tm local;
        strftime(time_text, sizeof time_text, "%F %T", localtime_r(&now, &local));
        gethostname(host, sizeof host - 1);
        fprintf(file_, "\n[%s] %s:%d:%ld [0] mock.cc:1 NCCL WARN %s\n", time_text, host, getpid(),
                syscall(SYS_gettid), text.c_str());
    }

  private:
    bool on_ = false;
    FILE* file_ = stdout;
};

}  // namespace

void warn(const std::string& text) {
    static DebugLog* log = new DebugLog;
    log->warn(text);
}

const char* environment(const char* name) {
    const char* value = getenv(name);
    return value && *value ? value : nullptr;
}

Comm::~Comm() {
    if (segment && segment->presence(rank) == kPresent) segment->set_presence(rank, kLeft);
}

void Comm::wait_quiet() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return finished == issued; });
}

bool Comm::quiet() {
    std::lock_guard lock(mutex);
    return finished == issued;
}

void Comm::wait_graphs() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return graphs == 0; });
}

std::shared_ptr<void> Comm::hold_for_graph() {
    if (nranks == 1) return nullptr;  // one rank alone has nothing of the library in its graphs
    std::lock_guard lock(mutex);
    ++graphs;
    return {this, [self = shared_from_this()](void*) {
                std::lock_guard inner(self->mutex);
                --self->graphs;
                self->changed.notify_all();
            }};
}

void Comm::stop(std::atomic<bool>& flag) {
    flag = true;
    std::unique_lock lock(mutex);
    changed.notify_all();
    // A bell may ring between a look at the flag and the sleep of who looks: ring until all have left.
    while (inside > 0) {
        if (segment) segment->ring(rank);
        changed.wait_for(lock, std::chrono::milliseconds(5));
    }
}

void Comm::look_at_peers() {
    const char* on = environment("NCCL_MOCK_PEER_ERRORS");
    if (!on || *on != '1' || stopped()) return;
    {
        std::lock_guard lock(mutex);
        if (!segment) return;
        auto now = std::chrono::steady_clock::now();
        if (now - looked_at_peers < std::chrono::milliseconds(100)) return;
        looked_at_peers = now;
    }
    for (int peer = 0; peer < nranks; ++peer) {
        Presence p = segment->presence(peer);
        bool ended = p == kPresent && segment->pid(peer) && process_ended(segment->pid(peer));
        if (peer == rank || (p != kAborted && !ended)) continue;
        int expected = state;
        if (expected != kSuccess && expected != kInProgress) continue;
        std::string text = "rank " + std::to_string(peer) + (ended ? "'s process has ended" : " has aborted");
        set_last_error(shared_from_this(),
                       text + " (NCCL mock)");  // before whoever sees the state asks for it
        state.compare_exchange_strong(expected, kRemoteError);
    }
}

bool Comm::exchange(const void* mine, size_t bytes, void* all) {
    std::set<int> peers;
    for (int peer = 0; peer < nranks; ++peer) peers.insert(peer);
    memmove(static_cast<char*>(all) + rank * bytes, mine, bytes);
    return exchange_with(peers, mine, bytes, all, true);
}

bool Comm::meet(const std::set<int>& peers) {
    std::vector<char> all(nranks);
    return exchange_with(peers, "", 1, all.data(), false);
}

bool Comm::exchange_with(const std::set<int>& peers, const void* mine, size_t bytes, void* all,
                         bool while_revoked) {
    std::lock_guard one(control);
    {
        std::lock_guard lock(mutex);
        ++inside;
    }
    Signature none;
    memset(&none, 0, sizeof none);
    char* out = static_cast<char*>(all);
    std::vector<Transfer> transfers;
    for (int peer : peers) {
        if (peer == rank) continue;
        transfers.push_back(Transfer::send(kControl, rank, peer, mine, bytes, false));
        transfers.push_back(Transfer::receive(kControl, rank, peer, out + peer * bytes, bytes));
    }
    auto ended = [&] { return aborted || (revoked && !while_revoked); };
    bool all_done = false;
    while (!all_done && !ended()) {
        uint32_t seen = segment->bell(rank);
        bool moved = false;
        all_done = true;
        for (Transfer& t : transfers) {
            moved |= t.step(*segment, none);
            all_done &= t.done();
        }
        if (all_done) break;
        look_at_peers();
        if (state == kRemoteError) break;
        if (!moved && !ended()) segment->wait(rank, seen, 50);
    }
    std::lock_guard lock(mutex);
    --inside;
    changed.notify_all();
    return all_done;
}

// A handle is an address that is never used again, so that one which was destroyed is recognised.
CommHandle reserve_handle() { return new char[16]; }

CommHandle new_handle(const CommPtr& comm) {
    CommHandle handle = reserve_handle();
    std::lock_guard lock(handles().mutex);
    handles().live[handle] = comm;
    return handle;
}

CommPtr live_comm(CommHandle handle) {
    std::lock_guard lock(handles().mutex);
    auto found = handles().live.find(handle);
    return found == handles().live.end() ? nullptr : found->second;
}

void drop_handle(CommHandle handle) {
    CommPtr last;  // goes after the lock
    std::lock_guard lock(handles().mutex);
    auto found = handles().live.find(handle);
    if (found == handles().live.end()) return;
    last = std::move(found->second);
    handles().live.erase(found);
}

bool Call::find(CommHandle handle) {
    if (!handle) {
        error = fail(kInvalidArgument, std::string(function) + ": the communicator is NULL");
        return false;
    }
    comm = live_comm(handle);
    if (comm) return true;
    error = fail(kInvalidArgument,
                 std::string(function) + ": no live communicator; was it destroyed or aborted?");
    return false;
}

bool Call::find_ready(CommHandle handle) {
    if (!find(handle)) return false;
    int state = comm->state;
    if (state == kInProgress || comm->busy_polls > 0)
        error = fail(kInvalidArgument, "the communicator is used before its previous call has succeeded");
    else if (state != kSuccess)
        error = fail(static_cast<Result>(state), "the communicator has an asynchronous error");
    else if (comm->suspended)
        error = fail(kInvalidUsage, "the communicator is suspended");
    return error == kSuccess;
}

Result Call::fail(Result code, const std::string& text) {
    set_last_error(comm, text + " (NCCL mock)");
    extra += ",\"error\":" + quoted(text);
    return done(code);
}

Result Call::done(Result code) {
    if (!environment("NCCL_MOCK_LOG")) return code;
    std::string line = std::string("\"function\":\"") + function + "\"";
    if (comm) {
        line += ",\"comm\":" + quoted(comm->id);
        add(line, "rank", comm->rank);
        add(line, "nranks", comm->nranks);
    }
    if (count >= 0) add(line, "count", count);
    if (dtype >= 0) add(line, "dtype", dtype);
    if (op >= 0) add(line, "op", op);
    if (root >= 0) add(line, "root", root);
    if (peer >= 0) add(line, "peer", peer);
    if (send) add(line, "send", reinterpret_cast<long long>(send));
    if (recv) add(line, "recv", reinterpret_cast<long long>(recv));
    if (has_stream) add(line, "stream", reinterpret_cast<long long>(stream));
    add(line, "depth", group_depth());
    add(line, "result", code);
    add(line, "thread", syscall(SYS_gettid));
    write_log(line + extra);
    return code;
}

void write_log(const std::string& members) {
    const char* path = environment("NCCL_MOCK_LOG");
    if (!path) return;
    std::string line = "{\"pid\":" + std::to_string(getpid()) + "," + members + "}\n";
    int fd = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0) return;
    // One write a line: lines of several processes do not mix.
    if (write(fd, line.data(), line.size()) < 0) perror("NCCL_MOCK_LOG");
    close(fd);
}

void log_mismatch(const Comm& comm, const Signature& mine, int peer, const Signature& theirs) {
    std::string line = "\"event\":\"mismatch\",\"comm\":" + quoted(comm.id);
    add(line, "rank", comm.rank);
    add(line, "peer", peer);
    write_log(line + ",\"mine\":" + members(mine) + ",\"theirs\":" + members(theirs));
}

void set_last_error(const CommPtr& comm, const std::string& text) {
    warn(text);
    own_last_error = text;
    std::lock_guard lock(handles().mutex);
    handles().last_error = text;
    if (comm) comm->last_error = text;
}

std::string last_error(const CommPtr& comm) {
    std::lock_guard lock(handles().mutex);
    if (comm && !comm->last_error.empty()) return comm->last_error;
    return own_last_error.empty() ? handles().last_error : own_last_error;
}

}  // namespace mock_nccl
