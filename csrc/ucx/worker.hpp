// One communicator's UCX worker: its endpoints and its messages.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "transport/transport.hpp"
#include "ucx/library.hpp"

namespace unicomm::ucx {

using transport::Failure;
using transport::Kind;
using transport::Request;

class Worker final : public transport::Transport {
  public:
    // Names, without UCX_, and values of UCX's configuration, and whether this UCX has to have them.
    using Settings = std::vector<std::tuple<std::string, std::string, bool>>;

    // `spin_ns`: for how long a wait polls before it sleeps. Throws Failure.
    Worker(std::shared_ptr<Library> library, int rank, int size, const Settings& settings, uint64_t spin_ns);
    ~Worker() override { drop(); }

    const std::string& address() const { return address_; }
    // Makes the endpoints to the workers with these addresses, in order of ranks. Throws Failure.
    void connect(const std::vector<std::string>& addresses);
    // As "transport/device" for each way to a peer, unless this UCX does not tell.
    std::vector<std::string> transports(int peer) const;

    Request* send(int peer, const void* data, size_t bytes, Kind kind, uint32_t tag) override;
    Request* receive(int peer, void* data, size_t bytes, Kind kind, uint32_t tag) override;
    // UCX completes a send that it has only buffered, and sends the rest when it is called next, which may be
    // much later. It answers receives in the same way. Begins a flush if none covers the last message.
    bool flushed() override;

  protected:
    bool is_open() const override { return context_ != nullptr; }
    bool progress() override;
    bool may_sleep() override;
    void sleep(int milliseconds) override;
    bool end(bool given_up) override;
    void abandon(bool forked) override;

  private:
    void make_context(const Settings& settings);
    Request* begun(Request* request, StatusPointer got, const ReceiveInfo* info);
    static void sent(void* native, Status status, void* request);
    static void received(void* native, Status status, const ReceiveInfo* info, void* request);
    static void broke_off(void* worker, Endpoint endpoint, Status status);
    void over(Request& request, Status status, const ReceiveInfo* info);
    void reap();
    Failure failure(const char* what, Status status) const;
    Failure failure_of(const Request& request, Status status) const;
    void check(const char* what, Status status) const;

    std::shared_ptr<Library> library_;
    const Functions& ucx_;
    Context context_ = nullptr;
    NativeWorker worker_ = nullptr;
    std::string address_;
    std::vector<Endpoint> endpoints_;
    std::vector<std::pair<Request*, Status>> over_;  // that UCX has told, and not got back yet
    int ready_ = -1;  // UCX's file, which is readable when there is something to do
    // Messages that had begun or completed when the flush began that is under way, and when the last one
    // began that is over.
    uint64_t flushing_ = 0, flushed_ = 0;
    StatusPointer flush_ = nullptr;
};

}  // namespace unicomm::ucx
