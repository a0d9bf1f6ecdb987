// Small operations of ranks on several hosts, for the fast path: memory within a host, UCX between hosts.
//
// A collective is the first step of unicomm/backends/hosts/first_step.py, with its data. Messages within the
// host, or all to other hosts, run here as well.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "base/bind.hpp"
#include "operations/opcode.hpp"
#include "shm/group.hpp"
#include "ucx/fast.hpp"

namespace unicomm::hosts {

// A number for what all ranks must agree on: `Call.signature`, in this order.
uint64_t signature(uint32_t op, uint32_t dtype, uint32_t how, int root, uint64_t count, uint64_t extra);

// The part of an operation that failed, which tells how its fault is to be read.
enum class Part { kNone, kNear, kLate, kLeaders, kFar };

class Fast : public ucx::SupervisedOperations {
  public:
    // `hosts`: the ranks of each host, in order. `leaders`: null on ranks that are none. `supervisor`: see
    // unicomm/backends/hosts/supervisor.py. `slack`: seconds that the leaders wait longer, so
    // that ranks that know a cause report first; `for_others`: those that ranks wait longer for their leader.
    Fast(nb::object near, nb::object far, nb::object leaders, std::vector<std::vector<int>> hosts, int rank,
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
    // Lets go of the host's memory: no operation runs here any more. Called with the GIL while none runs.
    void close();
    Part failed_in() const { return failed_in_; }

  private:
    // What this host gives: one piece for all hosts, or one for each.
    struct Given {
        std::vector<ucx::Piece> pieces;
        size_t result = 0;  // bytes of the answer, which all ranks of this host get
    };
    static constexpr size_t kHead = 64;

    const std::vector<int>& members() const { return hosts_[size_t(host_)]; }
    bool is_leader() const { return leaders_ != nullptr; }
    Fault run_alone(const shm::Op& op, const Tensor& in, const Tensor& out) override;
    void begin_leaders();
    bool goes_by_leaders(size_t bytes) const;
    Fault stepped(const shm::Op& op, const Tensor& in, const Tensor& out);
    Fault go_straight(const shm::Op& op, const Tensor& in, const Tensor& out, uint64_t signed_as);
    Fault first_step(const shm::Op& op, const Tensor& in, uint64_t signature);
    Fault gather_near(const shm::Op& op, const Tensor& in, uint64_t signature, Given& given);
    void cut(OpCode code, size_t bytes, Given& given);
    bool combine(const shm::Op& op, const Given& given);
    bool fold_all_ranks(const shm::Op& op, const Given& given, char* to) const;
    void deliver(const shm::Op& op, const Tensor& in, const Tensor& out) const;
    Fault in_part(Part part, Fault fault);
    uint64_t later(uint64_t deadline, double seconds) const;
    const char* slot_of(int host, size_t bytes) const;

    nb::object near_object_, far_object_, leaders_object_;
    shm::Group* near_;  // null once it is closed
    ucx::Fast& far_;
    ucx::Fast* leaders_;
    const std::vector<std::vector<int>> hosts_;
    const size_t most_, most_for_each_;  // bytes of a host's data for all others, and for one of them
    const int rank_;
    const double slack_, for_others_;
    int host_ = 0, local_ = 0;
    std::vector<int> host_of_, local_of_;
    size_t largest_ = 0;
    Part failed_in_ = Part::kNone;
    // A host's data, the same in the order in which hosts get them, and the answer behind its head.
    std::unique_ptr<char[]> mine_, packed_, answer_;
};

}  // namespace unicomm::hosts
