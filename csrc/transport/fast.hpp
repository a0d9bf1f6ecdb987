// Operations over a transport, for the fast path: collectives whose data fit into slots, all-gathers,
// all-to-alls, and messages. Larger data go from tensor to tensor once the slots have shown that all call
// the same.
//
// An operation that takes longer than a moment tells Python code, its `supervisor`, which knows deadlines,
// asks other ranks and finds causes. What ends in the moment is told nobody.
#pragma once
#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "base/bind.hpp"
#include "operations/counts.hpp"
#include "operations/opcode.hpp"
#include "shm/group.hpp"
#include "transport/collectives.hpp"
#include "transport/messages.hpp"
#include "transport/supervised.hpp"

namespace unicomm::transport {

class Fast : public SupervisedOperations {
  public:
    // `supervisor`: `Supervisor` of unicomm/backends/transport/supervisor.py.
    Fast(std::shared_ptr<Transport> transport, Slots* slots, nb::object counts, nb::handle supervisor);

    int rank() const override { return transport_->rank(); }
    int world() const override { return transport_->size(); }
    // Whether a collective runs here, on all ranks that call the same, by this way or by `run`.
    bool fits(OpCode code, size_t bytes) const;
    // Whether its data travel in the slots.
    bool in_slots(OpCode code, size_t bytes) const;
    bool begins(const shm::Op& op, const Tensor& in) override;
    bool begins(const std::vector<shm::Message>& messages) override;
    Fault collective(const shm::Op& op, const Tensor& in, const Tensor& out) override;
    Fault exchange(const std::vector<shm::Message>& messages, uint64_t deadline_ns) override;

    // For operations of which one of this transport is a part: `swap_slots`, which counts as a barrier,
    // `collective` or `all_to_others` follows. Called with the GIL.
    void begin_part(OpCode code = OpCode::kBarrier) { enter(uint32_t(code)); }
    // The same on a rank that has no part in it.
    void pass_part() { ++counts_.entered; }
    // Each member gets `first` and its piece of every other one; one piece is for all. `slots`: of this
    // transport. Called without the GIL.
    Fault swap_slots(Slots& slots, Piece first, const std::vector<Piece>& pieces, uint64_t deadline_ns);
    // An all-to-all that all ranks are known to call, without the parts of the ranks `apart` for each other.
    Fault all_to_others(const shm::Op& op, const Tensor& in, const Tensor& out,
                        const std::vector<int>& apart);
    // Others, for some of the ranks.
    std::unique_ptr<Slots> slots_of(std::vector<int> members, size_t room) const {
        return std::make_unique<Slots>(transport_, std::move(members), room);
    }
    bool usable() const {
        return !closed_ && transport_->size() > 1 && !transport_->stopped() && !counts_.left;
    }
    Counts& counts() const { return counts_; }

    // Seconds in which an operation needs no supervision.
    double moment = 0.01;

    // The connections on which other ranks tell of faults. Throws `SystemFailure`.
    void hear(const std::vector<int>& connections);
    // It takes no operation any more, and closes its file. Called while none runs, or in a forked child.
    void close();
    ~Fast() override { close(); }
    // The messages of the last exchange, as (peer, send, number, bytes), but for those that were over when it
    // had taken a moment, or ended since. Called with the GIL.
    using Awaited = std::tuple<int, bool, uint64_t, int64_t>;
    std::vector<Awaited> awaited() const;

  private:
    class Running;
    Fault run_alone(const shm::Op& op, const Tensor& in, const Tensor& out) override;
    void enter(uint32_t code);
    void note_over(const std::vector<Finished>& finished);
    Fault failed(const std::string& why) const { return {FaultCode::kInternal, {}, {}, why}; }
    Ended waited(Running& running, const std::function<Ended(uint64_t)>& wait);
    bool told() const;
    Fault fault_of(Ended how);
    template <class Operation>
    Fault guarded(uint64_t deadline_ns, Operation operation);
    Fault swap(Running& running, Slots& slots, const void* head, Piece first,
               const std::vector<Piece>& pieces);
    size_t part_of(OpCode code, size_t bytes) const;
    Fault given_up(const Running& running);
    Fault trade(Running& running, const shm::Op& op, const Tensor& in, const Tensor& out,
                const std::vector<int>& apart);
    void fold_parts(const shm::Op& op, const Tensor& out, const std::vector<const void*>& sources) const;
    void take(const shm::Op& op, const Tensor& in, const Tensor& out);
    const char* slot_of(int rank, size_t bytes) const;
    std::shared_ptr<Transport> transport_;
    Slots* slots_;  // null: the ranks do not compare what they call
    nb::object counts_object_;
    Counts& counts_;
    std::vector<Awaited> awaited_;
    std::vector<bool> over_;  // which of them are; changed with the GIL
    bool at_once_ = false;    // the operation that runs is under supervision from its first wait on
    int faults_ = -1;         // an epoll file of the connections on which other ranks tell of faults
    std::atomic<bool> closed_{false};
};

}  // namespace unicomm::transport
