// The worker: creation, messages and the end.
#include "ucx/worker.hpp"

#include <poll.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>

#include "base/clock.hpp"
#include "ucx/sockets.hpp"

namespace unicomm::ucx {
namespace {

// A tag: the sender's rank, the kind, the user's tag.
constexpr int kRankAt = 40, kKindAt = 32;
constexpr Tag kAnySender = (Tag{1} << kRankAt) - 1;
constexpr uint64_t kCancels = 100'000'000;   // ns in which receives are cancelled that can be
constexpr uint64_t kLinkUp = 3'000'000'000;  // ns in which a link that is down for a moment is up again
constexpr unsigned kLinkLook = 50'000;       // microseconds between two looks at it

Tag tag_of(int rank, Kind kind, uint32_t tag) { return Tag(rank) << kRankAt | Tag(kind) << kKindAt | tag; }

bool is_request(StatusPointer got) {
    return got != nullptr && reinterpret_cast<uintptr_t>(got) < uintptr_t(intptr_t{kLastError});
}

Status status_of(StatusPointer got) { return static_cast<Status>(reinterpret_cast<intptr_t>(got)); }

}  // namespace

Worker::Worker(std::shared_ptr<Library> library, int rank, int size, const Settings& settings,
               uint64_t spin_ns)
    : Transport(rank, size, spin_ns), library_(std::move(library)), ucx_((*library_)()) {
    make_context(settings);
    try {
        Status status = kOk;
        WorkerParams worker{};
        worker.field_mask = kWorkerThreadMode | kWorkerFlags;
        worker.thread_mode = kSerialized;
        worker.flags = kIgnoreRequestLeak;
        // The context has listed the devices; one whose link went down since then is "no such device".
        const uint64_t end = now_ns() + (size_ == 1 ? 0 : kLinkUp);
        while ((status = ucx_.ucp_worker_create(context_, &worker, &worker_)) == kNoDevice &&
               now_ns() < end) {
            usleep(kLinkLook);
        }
        if (status == kNoDevice) {  // a rank alone on its host needs none; others say whom they do not reach
            ucx_.ucp_cleanup(std::exchange(context_, nullptr));
            make_context(settings);
            status = ucx_.ucp_worker_create(context_, &worker, &worker_);
        }
        check("ucp_worker_create", status);
        check("ucp_worker_get_efd", ucx_.ucp_worker_get_efd(worker_, &ready_));
        Address* address = nullptr;
        size_t length = 0;
        check("ucp_worker_get_address", ucx_.ucp_worker_get_address(worker_, &address, &length));
        address_.assign(static_cast<const char*>(address), length);
        ucx_.ucp_worker_release_address(worker_, address);
    } catch (...) {
        drop();
        throw;
    }
}

// Lists the devices that are up.
void Worker::make_context(const Settings& settings) {
    Config config = nullptr;
    check("ucp_config_read", ucx_.ucp_config_read(nullptr, nullptr, &config));
    for (const auto& [name, value, needed] : settings) {
        const Status set = ucx_.ucp_config_modify(config, name.c_str(), value.c_str());
        if (set < 0 && needed) {
            ucx_.ucp_config_release(config);
            throw failure(("setting " + name + "=" + value).c_str(), set);
        }
    }
    Params params{};
    params.field_mask = kFieldFeatures | kFieldMtWorkersShared | kFieldEstimatedEps;
    params.features = kFeatureTag | kFeatureWakeup;
    params.estimated_num_eps = size_t(size_);
    const Status status = ucx_.ucp_init_version(kOldest / 100, kOldest % 100, &params, config, &context_);
    ucx_.ucp_config_release(config);
    check("ucp_init", status);
}

void Worker::connect(const std::vector<std::string>& addresses) {
    for (const std::string& address : addresses) {
        EndpointParams params{};
        params.field_mask = kEpRemoteAddress | kEpErrorMode | kEpErrorHandler;
        params.address = address.data();
        params.error_mode = kErrorModePeer;  // else sends to a dead process never complete
        params.error_handler = {&broke_off, this};
        Endpoint endpoint = nullptr;
        if (int(endpoints_.size()) != rank_) {
            check("ucp_ep_create", ucx_.ucp_ep_create(worker_, &params, &endpoint));
        }
        endpoints_.push_back(endpoint);
    }
}

std::vector<std::string> Worker::transports(int peer) const {
    std::vector<std::string> found;
    Endpoint endpoint = size_t(peer) < endpoints_.size() ? endpoints_[size_t(peer)] : nullptr;
    if (endpoint == nullptr || library_->version() < kTellsTransports) return found;
    TransportEntry entries[16];
    EndpointAttributes attributes{};
    attributes.field_mask = kEpTransports;
    attributes.transports = {entries, 16, sizeof(TransportEntry)};
    if (ucx_.ucp_ep_query(endpoint, &attributes) != kOk) return found;
    for (unsigned i = 0; i < attributes.transports.count; ++i) {
        found.push_back(std::string(entries[i].transport_name) + "/" + entries[i].device_name);
    }
    std::sort(found.begin(), found.end());
    found.erase(std::unique(found.begin(), found.end()), found.end());
    return found;
}

// --- messages ---------------------------------------------------------------------------------------------

Request* Worker::send(int peer, const void* data, size_t bytes, Kind kind, uint32_t tag) {
    Request* request = begin(peer, true);
    RequestParams params{};
    params.mask = kOpCallback | kOpUserData | kOpMemoryType;
    params.callback.send = &sent;
    params.user_data = request;
    params.memory_type = kHostMemory;
    Endpoint endpoint = endpoints_.at(size_t(peer));
    return begun(request, ucx_.ucp_tag_send_nbx(endpoint, data, bytes, tag_of(rank_, kind, tag), &params),
                 nullptr);
}

Request* Worker::receive(int peer, void* data, size_t bytes, Kind kind, uint32_t tag) {
    Request* request = begin(peer, false);
    ReceiveInfo info{};
    RequestParams params{};
    params.mask = kOpCallback | kOpUserData | kOpMemoryType | kOpReceiveInfo;
    params.callback.receive = &received;
    params.user_data = request;
    params.memory_type = kHostMemory;
    params.receive_info = &info;
    const bool any = peer == transport::kAnyRank;
    StatusPointer got = ucx_.ucp_tag_recv_nbx(worker_, data, bytes, tag_of(any ? 0 : peer, kind, tag),
                                              any ? kAnySender : ~Tag{0}, &params);
    return begun(request, got, &info);
}

// `got`: what the call returned that began the message; the callback is not called if it is no request.
Request* Worker::begun(Request* request, StatusPointer got, const ReceiveInfo* info) {
    if (is_request(got)) {
        request->native = got;
        request->under_way = true;
        return request;
    }
    const Status status = status_of(got);
    over(*request, status, info);
    if (status < 0 && status != kTruncated) throw failure_of(*request, status);
    return request;
}

void Worker::over(Request& request, Status status, const ReceiveInfo* info) {
    request.cut = status == kTruncated;
    if (info != nullptr && (status >= 0 || request.cut)) {
        request.length = info->length;
        request.peer = int(info->sender_tag >> kRankAt);
    }
    finish(request);
}

void Worker::sent(void* native, Status status, void* user_data) {
    received(native, status, nullptr, user_data);
}

void Worker::received(void*, Status status, const ReceiveInfo* info, void* user_data) {
    auto* request = static_cast<Request*>(user_data);
    auto& worker = static_cast<Worker&>(*request->transport);
    worker.over(*request, status, info);
    worker.over_.emplace_back(request, status);
}

// Gives what is over back to UCX. Throws the first error.
void Worker::reap() {
    std::pair<Request*, Status> failed{nullptr, kOk};
    for (const auto& [request, status] : over_) {
        if (request->native != nullptr) ucx_.ucp_request_free(std::exchange(request->native, nullptr));
        if (status < 0 && status != kTruncated) failed = {request, status};
    }
    over_.clear();
    if (failed.first != nullptr) throw failure_of(*failed.first, failed.second);
}

// UCX ends the sends to a peer whose connection has ended, but not the receives from it.
void Worker::broke_off(void* argument, Endpoint endpoint, Status status) {
    auto& worker = *static_cast<Worker*>(argument);
    for (size_t peer = 0; peer < worker.endpoints_.size(); ++peer) {
        if (worker.endpoints_[peer] == endpoint) worker.broke(int(peer), worker.library_->text(status));
    }
}

// --- what a wait runs -------------------------------------------------------------------------------------

bool Worker::progress() {
    bool& no_memory = Library::lacks_memory();
    no_memory = false;  // something else in this thread may have lacked it
    const bool more = ucx_.ucp_worker_progress(worker_) != 0;
    if (no_memory) throw Failure("UCX has no memory for what arrives");
    reap();
    return more;
}

bool Worker::may_sleep() {
    const Status armed = ucx_.ucp_worker_arm(worker_);
    if (armed == kBusy) return false;
    check("ucp_worker_arm", armed);
    return true;
}

void Worker::sleep(int milliseconds) {
    pollfd files[] = {{ready_, POLLIN, 0}, {wake_, POLLIN, 0}};
    poll(files, 2, milliseconds);
    if (files[1].revents != 0) {
        uint64_t count;
        if (read(wake_, &count, sizeof count) < 0) return;
    }
}

bool Worker::flushed() {
    if (!is_open()) return true;
    for (;;) {
        if (flush_ != nullptr) {
            const Status status = ucx_.ucp_request_check_status(flush_);
            if (status == kInProgress) return false;
            ucx_.ucp_request_free(std::exchange(flush_, nullptr));
            // What is lost with a connection concerns those who wait for its rank, whose requests fail.
            if (all_connected()) check("a flush failed", status);
            flushed_ = flushing_;
        }
        // A flush that began before the last message, for a wait that was given up, does not cover it.
        if (flushed_ == events_) return true;
        flushing_ = events_;
        RequestParams params{};
        StatusPointer got = ucx_.ucp_worker_flush_nbx(worker_, &params);
        if (is_request(got)) {
            flush_ = got;
        } else {
            if (all_connected()) check("ucp_worker_flush", status_of(got));
            flushed_ = flushing_;
        }
    }
}

// --- the end ----------------------------------------------------------------------------------------------

bool Worker::end(bool given_up) {
    if (worker_ != nullptr) {
        const uint64_t end = now_ns() + kLeaves;
        // UCX tells each peer that a connection ends, and tries that for ever while a socket's buffer is
        // full, as that of a host that is gone.
        if (ready_ >= 0) end_full_sockets(ready_, all_connected() && !given_up ? end : 0);
        std::vector<StatusPointer> closing;
        RequestParams params{};
        params.mask = kOpFlags;
        params.flags = kCloseForce;
        for (Endpoint& endpoint : endpoints_) {
            if (endpoint == nullptr) continue;
            StatusPointer got = ucx_.ucp_ep_close_nbx(std::exchange(endpoint, nullptr), &params);
            if (is_request(got)) closing.push_back(got);
        }
        for (Request& request : requests_) {
            if (request.waits() && !request.send) ucx_.ucp_request_cancel(worker_, request.native);
        }
        if (flush_ != nullptr) closing.push_back(std::exchange(flush_, nullptr));
        auto sent_and_closed = [&] {
            return std::none_of(requests_.begin(), requests_.end(),
                                [](const Request& r) { return r.send && r.waits(); }) &&
                   std::all_of(closing.begin(), closing.end(), [&](StatusPointer got) {
                       return ucx_.ucp_request_check_status(got) != kInProgress;
                   });
        };
        auto received = [&] {
            return std::none_of(requests_.begin(), requests_.end(),
                                [](const Request& r) { return !r.send && r.waits(); });
        };
        auto run_until = [&](const auto& over, uint64_t limit) {
            while (!over()) {
                if (now_ns() > limit) return false;
                if (ucx_.ucp_worker_progress(worker_) == 0) sched_yield();
            }
            return true;
        };
        if (!run_until(sent_and_closed, end)) {
            keep_for_ever();
            return false;
        }
        // A receive that has got the first part of its message cannot be cancelled, and does not end when its
        // sender is gone. Without connections and without a worker nothing writes to its memory any more.
        run_until(received, std::min(end, now_ns() + kCancels));
        over_.clear();
        for (Request& request : requests_) {
            if (request.native != nullptr) ucx_.ucp_request_free(std::exchange(request.native, nullptr));
        }
        for (StatusPointer got : closing) ucx_.ucp_request_free(got);
        ucx_.ucp_worker_destroy(std::exchange(worker_, nullptr));
    }
    ucx_.ucp_cleanup(std::exchange(context_, nullptr));
    return true;
}

void Worker::abandon(bool) {
    context_ = nullptr;
    worker_ = nullptr;
    endpoints_.clear();
}

Failure Worker::failure(const char* what, Status status) const {
    return Failure(std::string(what) + ": " + library_->text(status));
}

Failure Worker::failure_of(const Request& request, Status status) const {
    if (request.peer >= 0) check_connected(request.peer);
    return failure(request.send ? "a send failed" : "a receive failed", status);
}

void Worker::check(const char* what, Status status) const {
    if (status < 0) throw failure(what, status);
}

}  // namespace unicomm::ucx
