// Operations of ranks on several hosts, for the fast path: memory within a host, a transport between hosts.
//
// A collective begins as the first step of unicomm/backends/hosts/first_step.py does: the ranks of a host
// compare what they call, one rank of each host, its leader, exchanges slots with the other leaders, and
// tells its host the outcome. The data of a small collective travel with that. If all hosts have as many
// ranks, the ranks with one number on their hosts are a column. A larger collective goes by all columns, each
// with a part of the data (columns.cpp), and so do small ones if every rank has a core: that is one step
// less, and more messages.
//
// Some ranks may take the one way and some the other only if they call different things. So each rank that
// learns of that without having exchanged slots exchanges them then, if it has a column that may wait for it.
//
// Messages within the host, or all to other hosts, run here as well.
#pragma once
#include <atomic>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/bind.hpp"
#include "hosts/parts.hpp"
#include "operations/opcode.hpp"
#include "shm/group.hpp"
#include "transport/fast.hpp"

namespace unicomm::hosts {

// A number for what all ranks must agree on: `Call.signature`, in this order.
uint64_t signature(uint32_t op, uint32_t dtype, uint32_t how, int root, uint64_t count, uint64_t extra);

// The part of an operation that failed, which tells how its fault is to be read.
enum class Part { kNone, kNear, kLate, kFar };

class Fast : public transport::SupervisedOperations {
  public:
    // `hosts`: the ranks of each host, in order. `crowded`: whether some host has more ranks than cores.
    // `supervisor`: see unicomm/backends/hosts/supervisor.py. `slack`: seconds that ranks wait longer for
    // other hosts, so that ranks that know a cause report first; `for_others`: those that ranks wait longer
    // for ranks of their host that may wait for others.
    Fast(nb::object near, nb::object far, std::vector<std::vector<int>> hosts, int rank, bool crowded,
         double slack, double for_others, nb::handle supervisor);

    int rank() const override { return rank_; }
    int world() const override { return far_.world(); }
    // Whether a collective runs here, on all ranks that call the same, by this way or by `run`.
    bool fits(OpCode code, DType dtype, Red red, size_t bytes) const;
    bool begins(const shm::Op& op, const Tensor& in) override;
    bool begins(const std::vector<shm::Message>& messages) override;
    Fault collective(const shm::Op& op, const Tensor& in, const Tensor& out) override;
    Fault exchange(const std::vector<shm::Message>& messages, uint64_t deadline_ns) override;
    // The first step of an operation of the general path, whose data it does not move: `kMismatch` if the
    // ranks call different things. Called without the GIL.
    Fault agree(uint64_t signature, uint64_t deadline_ns);
    // The leaders exchange bytes, as a part of an operation, and get those of each host. At most
    // `hosts_most_in_slot` and a head. Called without the GIL while nothing else runs.
    Fault swap_bytes(std::string_view mine, uint64_t deadline_ns, std::vector<std::string>& all);
    // Lets go of the host's memory: no operation runs here any more. Called with the GIL while none runs.
    void close();
    bool by_columns() const { return by_columns_; }
    Part failed_in() const { return failed_in_; }
    // The messages within the host that run, or have failed. Called with the GIL.
    std::vector<transport::Fast::Awaited> awaited_near() const;
    // The operation is over: other ranks that ask where this one is do not hear of it any more. After a fault
    // Python code says so, when it knows the cause.
    void over();

  private:
    // What this host gives: one piece for all hosts, or one for each.
    struct Given {
        std::vector<transport::Piece> pieces;
        size_t result = 0;  // bytes of the answer, which all ranks of this host get
    };
    struct Slice {
        size_t begin = 0, bytes = 0;
    };
    static constexpr size_t kHead = 64;

    const std::vector<int>& members() const { return hosts_[size_t(host_)]; }
    bool is_leader() const { return local_ == 0; }
    // Whether this rank exchanges slots in the first step.
    bool swaps() const { return by_columns_ || is_leader(); }
    Fault run_alone(const shm::Op& op, const Tensor& in, const Tensor& out) override;
    void enter(const shm::Op& op, size_t bytes);
    bool goes_by_leaders(size_t bytes) const;
    Fault stepped(const shm::Op& op, const Tensor& in, const Tensor& out);
    Fault go_straight(const shm::Op& op, const Tensor& in, const Tensor& out, uint64_t signed_as);
    Fault first_step(const shm::Op& op, const Tensor& in, uint64_t signature);
    Fault swap(uint64_t signature, const Given& given, bool alike, uint64_t deadline_ns, bool& good);
    Fault gather_near(const shm::Op& op, const Tensor& in, uint64_t signature, Given& given);
    void cut(OpCode code, size_t bytes, Given& given);
    bool combine(const shm::Op& op, const Given& given);
    bool fold_slots(const shm::Op& op, shm::Buffer to, size_t results, size_t i) const;
    void deliver(const shm::Op& op, const Tensor& in, const Tensor& out) const;
    static Fault odd_slot() { return {FaultCode::kInternal, {}, {}, "a slot of another size"}; }
    Fault in_part(Part part, Fault fault);
    uint64_t later(uint64_t deadline, double seconds) const;
    char* slot_of(int host, size_t bytes) const;

    // columns.cpp
    bool divides(OpCode code, DType dtype, Red red, size_t bytes) const;
    size_t sliced(OpCode code, size_t bytes) const;
    Carried carried(OpCode code, DType dtype, Red red, size_t bytes) const;
    size_t most_of_slice(OpCode code, Carried carried) const;
    Fault divided(const shm::Op& op, const Tensor& in, const Tensor& out, uint64_t signature);
    Fault divide(const shm::Op& op, const Tensor& in, Slice slice, uint64_t signature, Given& given);
    Fault join(const shm::Op& op, const Tensor& in, const Tensor& out, Slice slice);
    bool cuts_share(Carried carried, size_t bytes) const;
    Fault reduce_share(const shm::Op& op, Carried carried, const std::vector<shm::Buffer>& share,
                       uint64_t signature);
    bool fold_column(const shm::Op& op, Carried carried, shm::Buffer to);
    std::vector<shm::Buffer> shares(char* data, size_t bytes) const;
    std::vector<shm::Buffer> parts(int host, char* data, size_t stride, Slice slice) const;

    nb::object near_object_, far_object_;
    shm::Group* near_;  // null once it is closed
    transport::Fast& far_;
    const std::vector<std::vector<int>> hosts_;
    std::unique_ptr<transport::Slots> column_;  // a member for each host; null on ranks that have none
    const size_t most_, most_for_each_;         // bytes of a host's data for all others, and for one of them
    const int rank_;
    const double slack_, for_others_;
    int host_ = 0, local_ = 0;
    std::vector<int> host_of_, local_of_;
    size_t largest_ = 0;
    bool even_ = true;         // all hosts have as many ranks
    bool by_columns_ = false;  // small collectives as well
    Part failed_in_ = Part::kNone;
    std::atomic<bool> awaits_near_{false};
    // A host's data, the same in the order in which hosts get them, and the answer behind its head.
    std::unique_ptr<char[]> mine_, packed_, answer_;
};

}  // namespace unicomm::hosts
