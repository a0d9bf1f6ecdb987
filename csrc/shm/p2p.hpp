// Point-to-point messages that progress side by side. More can join while the first are in progress, and each
// completes on its own.
#pragma once
#include <atomic>
#include <cstdint>
#include <list>
#include <vector>

#include "base/clock.hpp"
#include "shm/group.hpp"

namespace unicomm::shm {

class Exchange {
  public:
    struct Done {
        size_t index;  // as returned by `add`
        int peer;      // the sender, also if any rank could send
        Fault fault;   // kMismatch: the message was refused; the others continue
    };

    explicit Exchange(Group& group, bool joinable = true)
        : group_(group), joinable_(joinable), closed_(size_t(group.world())) {}

    // Uses the tensor's memory until the message is done. Must not be called while `run` runs.
    size_t add(const Message& message);
    // Returns when a message is done, after `interrupt`, or at `return_ns`; `done` then holds the messages
    // that are newly done. A Fault ends all messages.
    Fault run(uint64_t deadline_ns, uint64_t return_ns, std::vector<Done>& done);
    // Makes `run`, or its next call, return. May be called from any thread.
    void interrupt();
    // Whether a thread of the program waits for any of the messages. May be called from any thread.
    void set_attended(bool attended) { attended_.store(attended, std::memory_order_relaxed); }
    size_t unfinished() const { return transfers_.size(); }
    // Held by whoever runs or numbers operations of the group.
    std::mutex& running() { return group_.running(); }

    // Of a message that is not in an Exchange, while no other is. Whether it needs no other rank to act any
    // more: a send that fits into the channel, or a receive of a message that has arrived whole and fits it.
    // False also if anything is wrong.
    bool can_run_at_once(const Message& message);
    // Waits until the receive `message` can run at once, until another message is the next one from its
    // sender, until `give_way()`, which is asked again after each `wake_me` of the group, or until
    // `return_ns`. Returns what `can_run_at_once` returns then.
    template <class GiveWay>
    bool arrives(const Message& message, uint64_t return_ns, GiveWay give_way) {
        auto ready = [&] {
            return (unread(message.peer) > 0 && !partly_arrived(message)) || damaged_ >= 0 || give_way();
        };
        group_.waiter_.until(ready, [&](bool) { return group_.is_broken_ || now_ns() >= return_ns; });
        return can_run_at_once(message);
    }
    // Runs a message that can run at once, or as soon as its first part is there, if that is while a wait
    // would spin. False: nothing has happened, or a rank's memory turned out to be damaged, which breaks the
    // group.
    bool run_soon(const Message& message);
    // Runs a message that can. False if a rank's memory turned out to be damaged, which breaks the group.
    bool run_at_once(const Message& message);

  private:
    bool can_step(Transfer& t);
    void step_send(Transfer& t);
    Fault step_recv(Transfer& t);
    bool match(Transfer& t, int peer);
    bool wanted_before(const Transfer& t, int peer) const;
    bool front(int peer, ChunkHeader& header);
    // The chunks of this message that have arrived: 0 if another one is the next in the channel.
    uint64_t arrived(const Message& m);
    // Of a receive whose message fits into the ring: the rest comes without any act of this rank.
    bool partly_arrived(const Message& m);
    uint64_t chunks_of(const Message& m) const;
    Transfer* early_from(int peer, uint32_t tag);
    Transfer* storing_from(int peer);
    void take_early(Transfer& t);
    bool can_store(int peer);
    std::vector<int> storable();
    Fault store(int peer);
    Fault mismatch(const Transfer& t, uint32_t dtype, uint64_t count) const;
    // The number of chunks that wait to be read, as the reader or the writer counts. If the count is
    // impossible: 0, and `damaged_` is the rank that wrote it.
    uint64_t unread(int peer);
    uint64_t unacknowledged(int peer);
    // Whether so many chunks fit into the ring to `peer`. Reads the peer's count, whose line the peer keeps
    // writing, only if they did not fit when it was read last.
    bool has_room(int peer, uint64_t chunks);
    // Whether the receiver has refused this message, of which a part or an offer is under way.
    bool is_rejected(const Transfer& t);
    // Reads the header of the first chunk from `peer`, once: what is checked is what is used.
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
    // A pass looks at all transfers in order. If an earlier receive found nothing at the front of a channel,
    // the channel is closed to later receives for the rest of the pass: what arrives meanwhile is not theirs.
    uint64_t pass_ = 0;
    std::vector<uint64_t> closed_;  // by peer: the last pass that found nothing
    Shared<bool> interrupted_{false};
    Shared<bool> attended_{true};
    int damaged_ = -1;  // the rank whose words in shared memory are damaged
};

}  // namespace unicomm::shm
