// Small operations of ranks on several hosts, for the fast path: memory within a host, UCX between hosts.
//
// A collective is the first step of unicomm/backends/hosts/first_step.py, with its data, so ranks may run it
// here or there. Messages within the host, or all to other hosts, run here as well.
#pragma once
#include <string>
#include <vector>

#include "base/bind.hpp"
#include "shm/group.hpp"
#include "ucx/fast.hpp"

namespace unicomm::hosts {

// A number for what all ranks must agree on: `Call.signature`, in this order.
uint64_t signature(uint32_t op, uint32_t dtype, uint32_t how, int root, uint64_t count, uint64_t extra);

// The part of an operation that failed, which tells how its fault is to be read.
enum class Part { kNone, kNear, kLate, kLeaders, kFar };

class Fast : public FastOperations {
  public:
    // `hosts`: the ranks of each host, in order. `leaders`: null on ranks that are none. `supervisor`: see
    // unicomm/backends/hosts/supervisor.py; held weakly. `slack`: seconds that the leaders wait longer, so
    // that ranks that know a cause report first; `for_others`: those that ranks wait longer for their leader.
    Fast(nb::object near, nb::object far, nb::object leaders, std::vector<std::vector<int>> hosts, int rank,
         double slack, double for_others, nb::handle supervisor);

    int rank() const override { return rank_; }
    int world() const override { return far_.world(); }
    std::mutex& running() override { return running_; }
    bool begins(const shm::Op& op, const Tensor& in) override;
    bool begins(const std::vector<shm::Message>& messages) override;
    Fault collective(const shm::Op& op, const Tensor& in, const Tensor& out) override;
    Fault exchange(const std::vector<shm::Message>& messages, uint64_t deadline_ns) override;
    void interrupted() override { ucx::ask(supervisor_, "interrupted"); }
    void abort() override { ucx::ask(supervisor_, "abort"); }

    void wait_idle() { std::lock_guard lock(running_); }
    // Lets go of the host's memory: no operation runs here any more. Called with the GIL while none runs.
    void close();
    Part failed_in() const { return failed_in_; }

  private:
    // A small operation: what this host gives, and what all get.
    struct Step {
        uint64_t signature = 0;
        uint64_t deadline = 0;
        size_t given = 0;   // bytes of this host's data, in `mine_`
        size_t result = 0;  // bytes of what all get, in `answer_`
    };
    static constexpr size_t kHead = 64;

    const std::vector<int>& members() const { return hosts_[size_t(host_)]; }
    bool is_leader() const { return leaders_ != nullptr; }
    bool fits(const shm::Op& op, const Tensor& in) const;
    Fault stepped(const shm::Op& op, const Tensor& in, const Tensor& out);
    Fault gather_near(const shm::Op& op, const Tensor& in, Step& step);
    bool combine(const shm::Op& op, const Step& step);
    void deliver(const shm::Op& op, const Tensor& in, const Tensor& out) const;
    Fault in_part(Part part, Fault fault);
    uint64_t later(uint64_t deadline, double seconds) const;
    char* mine() { return slot_.data() + kHead; }
    const char* slot_of(int host, size_t bytes) const;

    nb::object near_object_, far_object_, leaders_object_, supervisor_;
    shm::Group* near_;  // null once it is closed
    ucx::Fast& far_;
    ucx::Fast* leaders_;
    const std::vector<std::vector<int>> hosts_;
    const size_t most_;  // bytes of a host's data in a slot
    const int rank_;
    const double slack_, for_others_;
    int host_ = 0, local_ = 0;
    std::vector<int> host_of_, local_of_;
    size_t largest_ = 0;
    std::mutex running_;
    Part failed_in_ = Part::kNone;
    std::vector<char> slot_, answer_;
};

}  // namespace unicomm::hosts
