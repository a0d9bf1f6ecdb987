// Point-to-point messages that run side by side: more can join while the first are under way, and each
// finishes on its own.
#pragma once
#include <atomic>
#include <cstdint>
#include <list>
#include <vector>

#include "shm/group.hpp"

namespace unicomm::shm {

class Exchange {
  public:
    struct Done {
        size_t index;  // as `add` returned it
        int peer;      // who sent it, also where any rank could
        Fault fault;   // kMismatch: the message was refused; the others go on
    };

    explicit Exchange(Group& group, bool joinable = true)
        : group_(group), joinable_(joinable), closed_(size_t(group.world())) {}

    // Takes the tensor's memory until the message is done. Not while `run` runs.
    size_t add(const Message& message);
    // Returns when a message is done, after `interrupt`, or at `return_ns`; `done` then holds what is newly
    // done. A Fault ends all of them.
    Fault run(uint64_t deadline_ns, uint64_t return_ns, std::vector<Done>& done);
    // Makes `run` return, or its next call; from any thread.
    void interrupt();
    size_t unfinished() const { return transfers_.size(); }

  private:
    static constexpr uint64_t kUnmatched = ~uint64_t{0};
    struct Transfer {
        Message message;
        size_t index;
        uint64_t number = kUnmatched;  // of the message in its channel
        uint64_t done = 0;             // bytes
        uint64_t offered = 0;          // the tail of the channel when the receiver has read what was offered
        bool begun = false;            // the first chunk (which an empty message has too) is through
        bool finished = false;
        bool fresh = true;  // not looked at yet
        Fault fault{};
    };

    bool can_step(Transfer& t);
    void step_send(Transfer& t);
    Fault step_recv(Transfer& t);
    bool match(Transfer& t, int peer);
    // How many chunks wait to be read, by the reader's or the writer's count; where that cannot be, none,
    // and `damaged_` says whose.
    uint64_t unread(int peer);
    uint64_t unacknowledged(int peer);
    // The front one of what `peer` sends, once: what is checked is what is used.
    bool read_header(int peer, ChunkHeader& header);
    void refuse(Transfer& t, Fault fault);
    void finish(Transfer& t);
    bool any_movable();
    void begin_pass() { ++pass_; }
    Fault reach_receivers(uint64_t deadline_ns);
    bool must_stop(uint64_t deadline_ns, bool deep, Fault& fault);

    Group& group_;
    bool joinable_;
    std::list<Transfer> transfers_;  // unfinished, in the order of `add`
    size_t added_ = 0;
    // A look at all transfers in order. A channel at whose front an earlier receive found nothing stays
    // closed to the later ones until the next: what arrives meanwhile is not theirs.
    uint64_t pass_ = 0;
    std::vector<uint64_t> closed_;  // by peer: the last pass that found nothing
    std::atomic<bool> interrupted_{false};
    int damaged_ = -1;  // what this rank wrote cannot be
};

}  // namespace unicomm::shm
