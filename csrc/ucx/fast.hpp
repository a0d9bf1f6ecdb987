// Small operations over a worker, for the fast path: collectives whose data fit into slots, and messages.
//
// An operation that takes longer than a moment tells Python code, its `supervisor`, which knows deadlines,
// asks other ranks and finds causes. What ends in the moment is told nobody.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "base/bind.hpp"
#include "operations/counts.hpp"
#include "shm/fast_operations.hpp"
#include "shm/group.hpp"
#include "ucx/collectives.hpp"

namespace unicomm::ucx {

class Fast : public FastOperations {
  public:
    static constexpr int64_t kMost = 4096;  // bytes of a rank's data that travel with its signature

    // Holds `supervisor` only weakly: see `Supervisor` in unicomm/backends/ucx/supervisor.py.
    Fast(std::shared_ptr<Worker> worker, Slots* slots, nb::object counts, nb::handle supervisor);

    int rank() const override { return worker_->rank(); }
    int world() const override { return worker_->size(); }
    std::mutex& running() override { return running_; }
    bool begins(const shm::Op& op, const Tensor& in) override;
    bool begins(const std::vector<shm::Message>& messages) override;
    Fault collective(const shm::Op& op, const Tensor& in, const Tensor& out) override;
    Fault exchange(const std::vector<shm::Message>& messages, uint64_t deadline_ns) override;
    void interrupted() override { ask("interrupted"); }
    void abort() override { ask("abort"); }

    // Seconds in which an operation needs no supervision.
    double moment = 0.01;

    // Waits until no operation runs. Called without the GIL.
    void wait_idle() { std::lock_guard lock(running_); }
    // The messages of the last exchange, as (peer, send, number, bytes).
    using Awaited = std::tuple<int, bool, uint64_t, int64_t>;
    const std::vector<Awaited>& awaited() const { return awaited_; }

  private:
    class Running;
    Fault failed(const std::string& why) const { return {FaultCode::kInternal, {}, {}, why}; }
    Ended waited(Running& running, const std::function<Ended(uint64_t)>& wait);
    Fault ended(Ended how);
    void take(const shm::Op& op, const Tensor& in, const Tensor& out);
    const char* slot_of(int rank, size_t bytes) const;
    // Calls a method of `supervisor` that returns whether the operation must fail. Without `supervisor`, it
    // must.
    template <class... Arguments>
    bool ask(const char* method, Arguments... arguments) const;

    std::shared_ptr<Worker> worker_;
    Slots* slots_;  // null: the ranks do not compare what they call
    nb::object counts_object_, supervisor_;
    Counts& counts_;
    std::mutex running_;
    std::vector<Awaited> awaited_;
};

}  // namespace unicomm::ucx
