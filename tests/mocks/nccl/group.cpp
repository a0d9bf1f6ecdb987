#include "group.hpp"

#include <algorithm>
#include <cstring>
#include <map>
#include <set>
#include <thread>

namespace mock_nccl {
namespace {

struct Pending {
    std::unique_ptr<Operation> operation;
    std::shared_ptr<Stream> stream;
};

struct Task {
    CommPtr comm;
    bool blocking;
    std::function<Result()> work;
};

struct Group {
    int depth = 0;
    Result error = kSuccess;
    std::vector<Pending> pending;
    std::vector<Task> tasks;
};
thread_local Group group;

// Operations of a group that share a communicator or a stream: they start together and go on together.
struct Job {
    std::vector<Pending> pending;
    std::vector<std::pair<CommPtr, uint64_t>> turns;  // each communicator with this job's number in it
    bool shares(const Pending& p) const {
        return std::any_of(pending.begin(), pending.end(), [&](const Pending& mine) {
            return mine.stream == p.stream || mine.operation->comm == p.operation->comm;
        });
    }
    void run();
    bool step();
};

bool Job::step() {
    bool moved = false;
    std::set<std::tuple<Comm*, std::tuple<int, int, bool>>> waiting;
    for (Pending& p : pending) {
        Operation& o = *p.operation;
        if (o.done) continue;
        if (o.comm->stopped()) {
            o.done = true;
            continue;
        }
        auto key = std::make_tuple(o.comm.get(), o.queue);
        if (waiting.count(key)) continue;
        moved |= o.step();
        if (!o.done) waiting.insert(key);
    }
    return moved;
}

void Job::run() {
    // Operations of one communicator run in the order of issue, whatever their streams are. Who aborts one of
    // several communicators does not wait for the turn in the others.
    for (auto& [comm, number] : turns) {
        std::unique_lock lock(comm->mutex);
        comm->changed.wait(lock, [n = number, c = comm.get()] { return c->finished == n || c->stopped(); });
    }
    for (auto& turn : turns) {
        std::lock_guard lock(turn.first->mutex);
        ++turn.first->inside;
    }
    auto all_done = [&] {
        return std::all_of(pending.begin(), pending.end(),
                           [](const Pending& p) { return p.operation->done; });
    };
    Comm& first = *turns[0].first;
    while (!all_done()) {
        uint32_t seen = first.segment->bell(first.rank);
        if (step() || all_done()) continue;
        for (auto& turn : turns) turn.first->look_at_peers();
        // One bell can be slept on; of several communicators the others are looked at often.
        first.segment->wait(first.rank, seen, turns.size() == 1 ? 50 : 1);
    }
    for (auto& [comm, number] : turns) {
        std::lock_guard lock(comm->mutex);
        --comm->inside;
        ++comm->finished;
        comm->changed.notify_all();
    }
}

// Jobs get their numbers and their places in the streams at once, so that both orders are the same.
std::mutex& issuing() {
    static std::mutex* m = new std::mutex;
    return *m;
}

void launch(std::vector<Pending> pending);

// Leaves operations for the graph that captures their streams; false when no stream is captured.
bool captured(std::vector<Pending>& pending) {
    if (std::none_of(pending.begin(), pending.end(), [](Pending& p) { return p.stream->capture(); }))
        return false;
    std::vector<std::shared_ptr<Operation>> kept;
    std::vector<std::shared_ptr<void>> held;
    for (Pending& p : pending) {
        held.push_back(p.operation->comm->hold_for_graph());
        kept.push_back(std::move(p.operation));
    }
    pending[0].stream->capture_node([kept, held](const std::shared_ptr<Stream>& stream) {
        std::vector<Pending> anew;
        for (auto& operation : kept) anew.push_back({operation->again(), stream});
        launch(std::move(anew));
    });
    return true;
}

void launch(std::vector<Pending> pending) {
    if (captured(pending)) return;
    std::vector<std::shared_ptr<Job>> jobs;
    for (Pending& p : pending) {
        auto into = std::make_shared<Job>();
        for (auto& job : jobs) {
            if (!job->shares(p)) continue;
            std::move(job->pending.begin(), job->pending.end(), std::back_inserter(into->pending));
            job->pending.clear();
        }
        into->pending.push_back(std::move(p));
        jobs.erase(std::remove_if(jobs.begin(), jobs.end(), [](auto& j) { return j->pending.empty(); }),
                   jobs.end());
        jobs.push_back(into);
    }
    std::lock_guard lock(issuing());
    for (auto& job : jobs) {
        std::vector<std::shared_ptr<Stream>> streams;
        for (Pending& p : job->pending) {
            CommPtr& comm = p.operation->comm;
            bool known =
                std::any_of(job->turns.begin(), job->turns.end(), [&](auto& t) { return t.first == comm; });
            if (!known) {
                std::lock_guard inner(comm->mutex);
                job->turns.emplace_back(comm, comm->issued++);
            }
            if (std::find(streams.begin(), streams.end(), p.stream) == streams.end())
                streams.push_back(p.stream);
        }
        // It runs in the first stream, after what is in the others and before what comes into them.
        for (size_t i = 1; i < streams.size(); ++i) {
            auto before = std::make_shared<Mark>();
            streams[i]->enqueue([before] { before->set(); });
            streams[0]->enqueue([before] { before->wait(); });
        }
        auto after = std::make_shared<Mark>();
        streams[0]->enqueue([job, after] {
            job->run();
            job->pending.clear();
            job->turns.clear();
            after->set();
        });
        for (size_t i = 1; i < streams.size(); ++i) streams[i]->enqueue([after] { after->wait(); });
    }
}

// The host waits where the real library connects: at the first message with a peer, and at the first call of
// each collective.
Result connect(const std::vector<Pending>& pending) {
    std::map<CommPtr, std::pair<std::set<int>, std::set<std::string>>> fresh;
    for (const Pending& p : pending) {
        const Operation& o = *p.operation;
        auto [kind, peer, sends] = o.queue;
        std::lock_guard lock(o.comm->mutex);
        if (kind == kPointToPoint && o.comm->met_peers.insert(peer).second) fresh[o.comm].first.insert(peer);
        if (kind == kCollective && o.comm->met_collectives.insert(o.signature.function).second)
            fresh[o.comm].second.insert(o.signature.function);
    }
    for (auto& [comm, missing] : fresh) {
        std::set<int> everyone;
        for (int rank = 0; rank < comm->nranks; ++rank) everyone.insert(rank);
        bool met = comm->meet(missing.first);
        for (size_t i = 0; i < missing.second.size(); ++i) met = met && comm->meet(everyone);
        if (!met) return comm->state == kRemoteError ? kRemoteError : kInternalError;
    }
    return kSuccess;
}

// Puts operations into their streams, with NCCL_MOCK_LAZY_CONNECT=1 once they are connected.
Result connect_and_launch(std::vector<Pending> pending) {
    if (!environment("NCCL_MOCK_LAZY_CONNECT")) {
        launch(std::move(pending));
        return kSuccess;
    }
    bool blocking = pending.empty();
    std::set<CommPtr> comms;
    for (const Pending& p : pending) {
        comms.insert(p.operation->comm);
        blocking |= p.operation->comm->settings.blocking();
    }
    auto kept = std::make_shared<std::vector<Pending>>(std::move(pending));
    auto work = [kept] {
        Result result = connect(*kept);
        if (result == kSuccess) launch(std::move(*kept));
        return result;
    };
    if (blocking) return work();
    for (const CommPtr& comm : comms) comm->state = kInProgress;
    start_thread([comms, work] {
        Result result = work();
        for (const CommPtr& comm : comms) {
            int expected = kInProgress;
            comm->state.compare_exchange_strong(expected, result);
        }
    });
    return kInProgress;
}

Result start(const Task& task) {
    if (task.blocking) return task.work();
    task.comm->state = kInProgress;
    start_thread([task] {
        int result = task.work(), expected = kInProgress;
        task.comm->state.compare_exchange_strong(expected, result);
    });
    return kInProgress;
}

Result run_tasks(std::vector<Task> tasks) {
    std::vector<Result> results(tasks.size(), kSuccess);
    std::vector<std::thread> threads;
    for (size_t i = 0; i < tasks.size(); ++i) threads.emplace_back([&, i] { results[i] = start(tasks[i]); });
    for (auto& t : threads) t.join();
    Result all = kSuccess;
    for (Result r : results)
        if (all == kSuccess || (all == kInProgress && r != kSuccess)) all = r;
    return all;
}

}  // namespace

int group_depth() { return group.depth; }

Result failed(Result code) {
    if (group.depth > 0 && group.error == kSuccess) group.error = code;
    return code;
}

Operation::Operation(CommPtr c, const char* function, int dtype, int op, int root, uint64_t count)
    : comm(std::move(c)) {
    memset(&signature, 0, sizeof signature);
    strncpy(signature.function, function, sizeof signature.function - 1);
    signature.dtype = dtype, signature.op = op, signature.root = root, signature.count = count;
}

bool Operation::step_transfers(std::vector<Transfer>& transfers, bool* all_done) {
    bool moved = false;
    *all_done = true;
    for (Transfer& t : transfers) {
        moved |= t.step(*comm->segment, signature);
        *all_done &= t.done();
        Signature theirs;
        if (t.take_mismatch(&theirs)) log_mismatch(*comm, signature, t.peer(), theirs);
    }
    return moved;
}

Result submit(Call& call, std::unique_ptr<Operation> operation) {
    auto stream = find_stream(call.stream);
    if (!stream) return failed(call.fail(kUnhandledCudaError, "no live stream"));
    CommPtr comm = operation->comm;
    if (stream->capture() && !operation->again())
        return failed(call.fail(kInvalidUsage, "the mock cannot capture that"));
    Pending p{std::move(operation), std::move(stream)};
    if (group.depth > 0) {
        group.pending.push_back(std::move(p));
        return call.done();
    }
    std::vector<Pending> one;
    one.push_back(std::move(p));
    if (Result connected = connect_and_launch(std::move(one))) return call.done(connected);
    if (comm->settings.blocking() || !environment("NCCL_MOCK_SLOW_ENQUEUE")) return call.done();
    comm->busy_polls = 2;
    return call.done(kInProgress);
}

Result perform(Call& call, const CommPtr& comm, bool blocking, std::function<Result()> work, bool says_so) {
    Task task{comm, blocking, std::move(work)};
    if (group.depth > 0) {
        group.tasks.push_back(std::move(task));
        return call.done();
    }
    Result result = start(task);
    return call.done(result == kInProgress && !says_so ? kSuccess : result);
}

}  // namespace mock_nccl

using namespace mock_nccl;

EXPORT Result ncclGroupStart() {
    Call call("ncclGroupStart");
    if (group.depth == 0) group = Group{};
    ++group.depth;
    return call.done();
}

EXPORT Result ncclGroupEnd() {
    Call call("ncclGroupEnd");
    if (group.depth == 0) return call.fail(kInvalidUsage, "ncclGroupEnd without ncclGroupStart");
    if (--group.depth > 0) return call.done();
    Group ended = std::move(group);
    group = Group{};
    // Nothing of a group with an error in it is started.
    if (ended.error != kSuccess) return call.done(ended.error);
    Result result = kSuccess;
    if (!ended.tasks.empty()) result = run_tasks(std::move(ended.tasks));
    if (result != kSuccess && result != kInProgress) return call.done(result);
    for (Pending& p : ended.pending) {
        Comm& comm = *p.operation->comm;
        if (comm.settings.blocking() || !environment("NCCL_MOCK_SLOW_ENQUEUE")) continue;
        comm.busy_polls = 2;
        result = kInProgress;
    }
    Result connected = connect_and_launch(std::move(ended.pending));
    return call.done(connected == kSuccess ? result : connected);
}

EXPORT Result ncclGroupSimulateEnd(SimInfo* info) {
    Call call("ncclGroupSimulateEnd");
    if (group.depth == 0) return call.fail(kInvalidUsage, "ncclGroupSimulateEnd without ncclGroupStart");
    if (--group.depth > 0) return call.done();
    Result error = group.error;
    if (info) info->estimatedTime = static_cast<float>(group.pending.size());
    group = Group{};
    return call.done(error);
}
